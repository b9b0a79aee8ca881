// What a person would do with a schedule and see; the answer is left in the document as JSON.
const answer = { errors: window.errors };
const every = (selector) => [...document.querySelectorAll(selector)];
const box = (part) => part.getBoundingClientRect();
const overlap = (a, b) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
const texts_clash = () => {
  const parts = [...every("#labels > *"), ...every("#axis text")].map(box);
  return parts.filter((a, i) => parts.some((b, j) => i < j && overlap(a, b))).length;
};
const point = (part, type, more = {}) => {
  const at = box(part);
  part.dispatchEvent(new PointerEvent(type, { bubbles: true, clientX: at.left + at.width / 2, clientY: at.top + at.height / 2, ...more }));
};
const seen = () => ({
  bars: every(".bar").length, areas: every(".area").length, arrows: every(".signals path.line").length,
  from: view.from, to: view.to, clash: texts_clash(), outside: every(".bar").filter((bar) => box(bar).left < box(plot).left - 3).length,
});
answer.first = seen();
answer.beside = Math.max(...every("#labels .title").map((label, i) => {
  const first = places.rows[i], top = box(plot).top + first.y;
  return Math.abs(box(label).top + box(label).height / 2 - (top + first.height / 2));
}));
const copy = every('.bar').find((bar) => bar.classList.contains("of1"));
point(copy, "pointermove");
answer.tip = tip.textContent;
answer.tip_shown = !tip.hidden && box(tip).right <= innerWidth && box(tip).bottom <= innerHeight;
answer.lit = every(".signals path.line.hot").length;
point(every(".area")[0], "pointermove");
answer.area_tip = tip.textContent;
point(plot, "pointerleave");
answer.tip_gone = tip.hidden;
const button = document.querySelector("#labels button");
button.click();
answer.opened = { ...seen(), expanded: document.querySelector("#labels button").getAttribute("aria-expanded"), lanes: every("#labels .lane").length };
document.querySelector("#labels button").click();
answer.closed = seen();
document.querySelector("#in").click();
answer.zoomed = seen();
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
answer.panned = seen();
for (let i = 0; i < 60; i++) document.querySelector("#in").click();
answer.closest = seen();
document.querySelector("#all").click();
answer.again = seen();
point(copy.isConnected ? copy : every(".bar.of1")[0], "dblclick");
answer.on_bar = seen();
document.querySelector("#all").click();
const choice = document.querySelector("#signals");
choice.value = "none"; choice.dispatchEvent(new Event("change"));
answer.no_arrows = seen().arrows;
choice.value = "all"; choice.dispatchEvent(new Event("change"));
answer.all_arrows = seen().arrows;
const paper = () => getComputedStyle(document.body).backgroundColor;
const papers = [paper()];
document.querySelector("#theme").click();
papers.push(paper());
answer.papers = papers;
answer.name = document.querySelector("#plot title").textContent.trim();
document.querySelector("#answer").textContent = JSON.stringify(answer);
