// Hover shows a step's line; a click keeps what led to it, through signals and the party's own past.
for (const picture of document.querySelectorAll("section.picture")) {
  const all = (selector) => [...picture.querySelectorAll(selector)];
  const rows = all(".row");
  const marks = all(".mark");
  const arrows = all(".arrow");
  const detail = picture.querySelector(".detail");
  const hint = detail.textContent;
  const source = picture.querySelector(".source");
  let pinned = null;

  const touches = (arrow, row) => arrow.dataset.start === row || arrow.dataset.end === row;

  function show(row) {
    for (const lit of all(".hot")) lit.classList.remove("hot");
    if (row === null) {
      detail.textContent = hint;
      return;
    }
    const entry = rows[row];
    entry.classList.add("hot");
    marks[row].classList.add("hot");
    for (const arrow of arrows) if (touches(arrow, String(row))) arrow.classList.add("hot");
    detail.textContent = entry.dataset.detail;
    const line = entry.dataset.line && picture.querySelector(`.line[data-line="${entry.dataset.line}"]`);
    if (!line) return;
    line.classList.add("hot");
    const above = line.offsetTop - source.offsetTop;
    if (above < source.scrollTop || above > source.scrollTop + source.clientHeight - 40)
      source.scrollTop = above - source.clientHeight / 3;
  }

  function past(row) {
    const found = new Set();
    const open = [row];
    while (open.length) {
      const at = open.pop();
      if (found.has(at)) continue;
      found.add(at);
      for (const arrow of arrows)
        if (Number(arrow.dataset.end) === at && !arrow.classList.contains("missing"))
          open.push(Number(arrow.dataset.start));
      for (let before = at - 1; before >= 0; before--)
        if (rows[before].dataset.lane === rows[at].dataset.lane) {
          open.push(before);
          break;
        }
    }
    return found;
  }

  function pin(row) {
    pinned = pinned === row ? null : row;
    picture.classList.toggle("pinned", pinned !== null);
    for (const part of all(".in")) part.classList.remove("in");
    if (pinned === null) return;
    const found = past(pinned);
    for (const at of found) {
      rows[at].classList.add("in");
      marks[at].classList.add("in");
    }
    for (const arrow of arrows) {
      const ends = [arrow.dataset.start, arrow.dataset.end].map(Number);
      if (ends.every((end) => found.has(end))) arrow.classList.add("in");
    }
  }

  for (const part of [...rows, ...marks]) {
    const row = Number(part.dataset.row);
    part.addEventListener("mouseenter", () => show(row));
    part.addEventListener("mouseleave", () => show(pinned));
    part.addEventListener("focus", () => show(row));
    part.addEventListener("click", () => pin(row));
  }
  picture.addEventListener("keydown", (event) => {
    const row = rows.indexOf(document.activeElement);
    if (event.key === "Escape" && pinned !== null) pin(pinned);
    if (row < 0) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && rows[row + step]) rows[row + step].focus();
    else if (event.key === "Enter" || event.key === " ") pin(row);
    else return;
    event.preventDefault();
  });
}
