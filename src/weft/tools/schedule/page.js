// Draws the schedule for the part of time that is looked at, again with every change of it.
const data = JSON.parse(document.querySelector("#data").textContent);
const [plot, axis, labels, tip] = ["plot", "axis", "labels", "tip"].map((id) => document.getElementById(id));
const HEAD = 24, ROW = 20, GAP = 4, AREA = 52, LANE = 11;
const LEAST = 0.05; // microseconds across, zoomed in as far as it goes
const view = { from: 0, to: data.end * 1.01 || 1, open: new Set() };
const NS = "http://www.w3.org/2000/svg";

function make(parent, name, attributes = {}, text = "") {
  const part = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) part.setAttribute(key, value);
  if (text) part.textContent = text;
  parent.append(part);
  return part;
}

// Where each row begins, and each lane of a row that is open.
function place() {
  let y = 0, rank = null;
  const rows = [], ranks = [];
  data.rows.forEach((row, number) => {
    if (row.rank !== rank) {
      rank = row.rank;
      ranks.push({ rank, y });
      y += HEAD;
    }
    const opened = row.area && view.open.has(number);
    const height = row.area ? AREA : ROW;
    rows.push({ y, height, lanes: row.lanes.map((_, i) => (opened ? y + AREA + GAP + i * LANE : y)) , opened });
    y += height + GAP + (opened ? row.lanes.length * LANE + GAP : 0);
  });
  return { rows, ranks, height: y + GAP };
}

let places = place(), width = 0;
const x = (time) => ((time - view.from) / (view.to - view.from)) * width;
const timeAt = (pixel) => view.from + (pixel / width) * (view.to - view.from);
const number = (us) => (us >= 100 ? us.toFixed(0) : us >= 10 ? us.toFixed(1) : us.toFixed(2));

function draw() {
  width = plot.clientWidth;
  plot.setAttribute("height", places.height);
  for (const group of plot.querySelectorAll("g, defs")) group.remove();
  const defs = make(plot, "defs");
  const hatch = make(defs, "pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  make(hatch, "line", { x1: 1.6, x2: 1.6, y1: 0, y2: 5, class: "hatch" });
  drawGrid();
  const bars = make(plot, "g", { class: "bars" });
  data.rows.forEach((row, i) => {
    const at = places.rows[i];
    if (row.area) drawArea(bars, row, at, i);
    if (!row.area) drawLane(bars, row.lanes[0], at.y, ROW, i, 0);
    else if (at.opened) row.lanes.forEach((lane, j) => drawLane(bars, lane, at.lanes[j], LANE - 1, i, j));
  });
  drawArrows();
  make(plot, "g", { class: "above" });
}

function drawGrid() {
  const ground = make(plot, "g");
  places.ranks.forEach(({ y }, i) => {
    const end = i + 1 < places.ranks.length ? places.ranks[i + 1].y : places.height;
    if (i % 2 === 0) make(ground, "rect", { class: "ranks", x: 0, y, width, height: end - y });
  });
  axis.replaceChildren();
  const wanted = (view.to - view.from) / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    make(ground, "line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: places.height });
    const anchor = x(at) < 20 ? "start" : x(at) > width - 20 ? "end" : "middle";
    make(axis, "text", { x: x(at), y: 17, "text-anchor": anchor }, at.toFixed(digits));
  }
}

function drawArea(parent, row, at, number) {
  const { times, counts, states, most } = row.area;
  const scale = at.height / most;
  make(parent, "line", { class: "base", x1: 0, x2: width, y1: at.y + at.height, y2: at.y + at.height });
  const below = times.map(() => 0);
  for (const [state, [kind, about]] of states.entries()) {
    const upper = [], lower = [];
    for (let i = 0; i < times.length; i++) {
      const end = i + 1 < times.length ? times[i + 1] : times[i];
      if (end < view.from || times[i] > view.to) { below[i] += counts[i][state]; continue; }
      const [x0, x1] = [x(Math.max(times[i], view.from)), x(Math.min(end, view.to))];
      const [low, high] = [below[i], below[i] + counts[i][state]].map((n) => at.y + at.height - n * scale);
      upper.push(`${x0.toFixed(2)},${high.toFixed(2)}`, `${x1.toFixed(2)},${high.toFixed(2)}`);
      lower.push(`${x1.toFixed(2)},${low.toFixed(2)}`, `${x0.toFixed(2)},${low.toFixed(2)}`);
      below[i] += counts[i][state];
    }
    if (!upper.length) continue;
    // Lower edge back to front, in pairs.
    const back = [];
    for (let i = lower.length - 2; i >= 0; i -= 2) back.push(lower[i], lower[i + 1]);
    make(parent, "path", { class: `area ${look_of(kind, about)}`, d: `M${[...upper, ...back].join("L")}z`, "data-row": number });
  }
}
const look_of = (kind, about) => (about >= 0 ? `of${about % data.colours}` : kind);

function drawLane(parent, lane, y, height, row, number) {
  let covered = -1, kindThere = -1;
  const tall = height > 14;
  lane.bars.forEach(([start, end, kind, name, about], i) => {
    if (end < view.from || start > view.to) return;
    const x0 = Math.max(x(start), -2), x1 = Math.min(x(end), width + 2);
    // What is no wider than a hair and lies on another of its kind shows nothing new.
    if (x1 - x0 < 0.4 && x1 <= covered && kind === kindThere) return;
    const inner = data.kinds[kind] !== "program";
    const kindClass = look_of(data.kinds[kind], about);
    const wide = Math.max(x1 - x0, 0.6);
    const inset = data.kinds[kind] === "signal" ? height * 0.2 : 0;
    make(parent, "rect", {
      class: wide > 4 ? `bar cut ${kindClass}` : `bar ${kindClass}`, x: x0.toFixed(2), y: y + inset, width: wide.toFixed(2), height: height - 2 * inset,
      rx: wide > 6 && tall ? 2 : 0, "data-row": row, "data-lane": number, "data-bar": i,
    });
    if (inner) { covered = x1 + 0.4; kindThere = kind; }
    if (tall && x1 - x0 > 34) {
      const room = Math.floor((x1 - x0 - 8) / 6.3), text = data.names[name];
      const said = text.length > room ? text.slice(0, Math.max(1, room - 1)) + "…" : text;
      const on = !["kernel", "program", "wait"].includes(kindClass);
      make(parent, "text", { class: on ? "said on" : "said", x: x0 + 4, y: y + height / 2 + 4 }, said);
    }
  });
}

function middle(row, lane) {
  const at = places.rows[row];
  if (!data.rows[row].area) return at.y + ROW / 2;
  return at.opened ? at.lanes[lane] + LANE / 2 : at.y + AREA - 6;
}

function drawArrows() {
  const mode = document.querySelector("#signals").value;
  const group = make(plot, "g", { class: "signals" });
  if (mode === "none") return;
  data.arrows.forEach(([, r0, l0, t0, r1, l1, t1, ended], i) => {
    if ((mode === "ended" && !ended) || t1 < view.from || t0 > view.to) return;
    const [x0, y0, x1, y1] = [x(t0), middle(r0, l0), x(t1), middle(r1, l1)];
    // Out of the bar that sent it, along, and into the row from its side.
    const lead = Math.max(14, Math.min(60, Math.abs(y1 - y0) / 4));
    const d = `M${x0.toFixed(1)},${y0}C${(x0 + lead).toFixed(1)},${y0} ${(x1 - lead).toFixed(1)},${y1} ${x1.toFixed(1)},${y1}`;
    const far = data.rows[r0].rank !== data.rows[r1].rank;
    make(group, "path", { class: far ? "line far" : "line", d, "data-arrow": i });
    make(group, "path", { class: "tip", d: `M${x1.toFixed(1)},${y1}l-6,-3.5v7z`, "data-arrow": i });
  });
  // A cloud of them says less than what lies behind it; what is pointed at stands out again.
  group.style.setProperty("--thick", Math.min(1, 90 / group.children.length).toFixed(2));
}

function drawLabels() {
  labels.replaceChildren();
  labels.style.height = `${places.height}px`;
  const put = (tag, name, y, height, text) => {
    const part = document.createElement(tag);
    part.className = name;
    part.style.cssText = `top: ${y}px; height: ${height}px; line-height: ${height}px`;
    part.textContent = text;
    labels.append(part);
    return part;
  };
  for (const { rank, y } of places.ranks) put("div", "rank", y, HEAD, `rank ${rank}`);
  data.rows.forEach((row, i) => {
    const at = places.rows[i];
    if (!row.area) { put("div", "title", at.y, at.height, row.title); return; }
    const button = put("button", "title", at.y, at.height, `${row.title} (${row.lanes.length})`);
    button.type = "button";
    button.dataset.row = i;
    button.setAttribute("aria-expanded", String(Boolean(at.opened)));
    button.addEventListener("click", () => {
      if (!view.open.delete(i)) view.open.add(i);
      redraw();
      labels.querySelector(`button[data-row="${i}"]`).focus();
    });
    if (at.opened) row.lanes.forEach((lane, j) => put("div", "lane", at.lanes[j], LANE, lane.title));
  });
}

function redraw() {
  places = place();
  drawLabels();
  draw();
}

// ---- what is looked at

function look(from, to) {
  const all = data.end * 1.01 || 1;
  const length = Math.min(Math.max(to - from, LEAST), all);
  view.from = Math.min(Math.max(from, 0), all - length);
  view.to = view.from + length;
  draw();
}
function zoom(factor, around = (view.from + view.to) / 2) {
  look(around - (around - view.from) * factor, around + (view.to - around) * factor);
}
const pan = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

document.querySelector("#in").addEventListener("click", () => zoom(0.6));
document.querySelector("#out").addEventListener("click", () => zoom(1 / 0.6));
document.querySelector("#all").addEventListener("click", () => look(0, Infinity));
document.querySelector("#signals").addEventListener("change", draw);
plot.addEventListener("wheel", (event) => {
  const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (!sideways && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  if (sideways) pan(event.deltaX / width);
  else zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, timeAt(event.clientX - plot.getBoundingClientRect().left));
}, { passive: false });
plot.addEventListener("keydown", (event) => {
  const does = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6),
    "-": () => zoom(1 / 0.6), 0: () => look(0, Infinity),
  }[event.key];
  if (!does) return;
  does();
  event.preventDefault();
});
let grabbed = null;
plot.addEventListener("pointerdown", (event) => {
  if (event.button === 0) grabbed = { x: event.clientX, from: view.from, to: view.to };
});
addEventListener("pointermove", (event) => {
  if (!grabbed) return;
  const moved = ((event.clientX - grabbed.x) / width) * (grabbed.to - grabbed.from);
  if (Math.abs(event.clientX - grabbed.x) < 3 && !plot.classList.contains("dragged")) return;
  plot.classList.add("dragged");
  look(grabbed.from - moved, grabbed.to - moved);
});
addEventListener("pointerup", () => {
  grabbed = null;
  plot.classList.remove("dragged");
});
plot.addEventListener("dblclick", (event) => {
  const bar = barOf(event.target);
  if (!bar) return;
  const around = (bar[1] - bar[0]) * 0.3;
  look(bar[0] - around, bar[1] + around);
});

// ---- what lies under the pointer

function barOf(part) {
  const { row, lane, bar } = part.dataset || {};
  return bar === undefined ? null : data.rows[row].lanes[lane].bars[bar];
}

function describe(part, time) {
  const bar = barOf(part);
  if (bar) {
    const [start, end, kind, name, about] = bar, row = data.rows[part.dataset.row];
    const whose = about >= 0 ? `\ndata of rank ${about}` : "";
    return `${data.names[name]}\n${number(start)} to ${number(end)} µs: ${number(end - start)} µs${whose}\n`
      + `rank ${row.rank}, ${row.lanes[part.dataset.lane].title} · ${data.kinds[kind]}: ${data.about[kind]}`;
  }
  if (!part.classList || !part.classList.contains("area")) return "";
  const row = data.rows[part.dataset.row], { times, counts, states, most } = row.area;
  const at = times.findLastIndex((one) => one <= time);
  if (at < 0) return "";
  const words = { work: "work", wait: "wait", program: "neither, data or an atomic is on its way", transfer: "move data" };
  const told = states.map(([kind, about], i) => {
    const whose = about >= 0 ? ` on data of rank ${about}` : "";
    return counts[at][i] ? `${+counts[at][i].toFixed(1)} ${words[kind]}${whose}` : "";
  }).filter(Boolean);
  return `rank ${row.rank}, ${number(time)} µs: of ${most} ${row.title === "SMs" ? "SMs" : "at once"}\n${told.join(", ") || "none"}`;
}

function light(part) {
  const group = plot.querySelector(".signals"), bar = barOf(part);
  for (const lit of group.querySelectorAll(".hot")) lit.classList.remove("hot");
  let some = false;
  if (bar) {
    const [row, lane] = [part.dataset.row, part.dataset.lane].map(Number), slack = 1e-3;
    const near = (time) => time >= bar[0] - slack && time <= bar[1] + slack;
    for (const path of group.children) {
      const [, r0, l0, t0, r1, l1, t1] = data.arrows[path.dataset.arrow];
      if ((r0 === row && l0 === lane && near(t0)) || (r1 === row && l1 === lane && near(t1))) {
        path.classList.add("hot");
        some = true;
      }
    }
  }
  group.classList.toggle("some", some);
}

plot.addEventListener("pointermove", (event) => {
  const box = plot.getBoundingClientRect(), time = timeAt(event.clientX - box.left);
  const above = plot.querySelector(".above");
  above.replaceChildren();
  make(above, "line", { class: "cursor", x1: event.clientX - box.left, x2: event.clientX - box.left, y1: 0, y2: places.height });
  if (plot.classList.contains("dragged")) return;
  light(event.target);
  tip.textContent = describe(event.target, time);
  tip.hidden = !tip.textContent;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
});
plot.addEventListener("pointerleave", () => {
  tip.hidden = true;
  plot.querySelector(".above").replaceChildren();
});
new ResizeObserver(() => draw()).observe(plot);
redraw();
