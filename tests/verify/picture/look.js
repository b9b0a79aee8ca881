// What a person would do on the page and see; the answer is left in the document as JSON.
const answer = { errors: window.errors };
const box = (part) => part.getBoundingClientRect();
const sections = [...document.querySelectorAll("section.picture")];
const overlap = (a, b) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
  Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
const clashes = (parts) => {
  let count = 0;
  for (let i = 0; i < parts.length; i++)
    for (let j = i + 1; j < parts.length; j++)
      if (overlap(box(parts[i]), box(parts[j]))) count++;
  return count;
};
answer.sections = sections.map((section) => {
  const all = (selector) => [...section.querySelectorAll(selector)];
  const rows = all(".row"), marks = all(".mark"), arrows = all(".arrow");
  const svg = section.querySelector("svg");
  const middle = (part) => (box(part).top + box(part).bottom) / 2;
  // A mark lies on no arrow but its own.
  let crossed = 0;
  for (const arrow of arrows)
    for (const mark of marks) {
      const own = [arrow.dataset.start, arrow.dataset.end].includes(mark.dataset.row);
      if (own) continue;
      const at = mark.ownerSVGElement.createSVGPoint(), b = mark.getBBox();
      at.x = b.x + b.width / 2; at.y = b.y + b.height / 2;
      arrow.style.strokeWidth = b.width;
      if (arrow.isPointInStroke(at)) crossed++;
      arrow.style.strokeWidth = "";
    }
  const seen = {
    rows: rows.length, marks: marks.length, arrows: arrows.length,
    heads: all(".head").length, lanes: all("text.lane").length,
    texts_on_texts: clashes(all(".row span, text.lane, text.rank")),
    marks_on_marks: clashes(marks), marks_on_arrows: crossed,
    texts_on_drawing: rows.filter((row) => box(row).left < box(svg).right - 1).length,
    beside: Math.max(...rows.map((row, i) => Math.abs(middle(row) - middle(marks[i])))),
    // Long lines are wrapped: nothing has to be moved sideways to be read.
    source_fits: all(".source").every((part) => part.scrollWidth <= part.clientWidth + 1),
    svg_fits: box(svg).height <= box(section.querySelector(".diagram")).height,
  };
  const last = rows.length - 1;
  marks[last].dispatchEvent(new MouseEvent("mouseenter"));
  seen.detail = section.querySelector(".detail").textContent;
  seen.hot = all(".row.hot").map((row) => row.dataset.row);
  seen.hot_lines = all(".line.hot").map((line) =>
    [...line.querySelectorAll("i, code")].map((part) => part.textContent));
  marks[last].dispatchEvent(new MouseEvent("click", { bubbles: true }));
  seen.kept = all(".row.in").map((row) => Number(row.dataset.row));
  seen.faint = getComputedStyle(all(".row:not(.in)")[0] || rows[0]).opacity;
  rows[last].focus();
  rows[last].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }));
  seen.focus = document.activeElement.dataset.row;
  rows[last].dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  seen.released = all(".in").length === 0 && !section.classList.contains("pinned");
  return seen;
});
const paper = () => getComputedStyle(document.body).backgroundColor;
answer.papers = [paper()];
document.querySelector("#theme").click();
answer.papers.push(paper());
document.querySelector("#theme").click();
answer.papers.push(paper());
document.querySelector("#answer").textContent = JSON.stringify(answer);
