"use strict";
// Reads only data-* attributes that the page was made with, and writes only text: nothing of a trace is ever parsed as HTML.
const inspect = document.getElementById("inspect");
let cursor = null;

function describe(run) {
  const first = Number(run.dataset.p), count = Number(run.dataset.n);
  const said = [count > 1 ? `tokens ${first} to ${first + count - 1}` : `token ${first}`];
  if (run.dataset.s !== undefined) said.push(`score above ${run.dataset.s} % of the history`);
  if (run.dataset.g) said.push(`dropped in turn ${run.dataset.g}`);
  if (run.dataset.w) said.push(`wanted back by turn ${run.dataset.w}`);
  if (run.dataset.x) said.push(`not in the prompt of turn ${run.dataset.x}`);
  if (run.dataset.c !== undefined) said.push(`confidence ${run.dataset.c} %`);
  if (run.classList.contains("query")) said.push("newest message, always kept in its turn");
  if (run.classList.contains("answer")) said.push("answer");
  if (run.classList.contains("act")) said.push("action");
  return said.join(" · ");
}

function point(run) {
  if (cursor) cursor.classList.remove("at");
  cursor = run;
  inspect.hidden = !run;
  if (!run) return;
  run.classList.add("at");
  inspect.textContent = describe(run);
}

function reveal(run) {
  point(run);
  run.closest(".text").focus({ preventScroll: true });
  run.scrollIntoView({ block: "center" });
}

function showAsOf(session, turn) {
  const slider = session.querySelector(".asof input");
  slider.value = String(turn);
  const now = Number(slider.value);
  for (const article of session.querySelectorAll(".turn")) {
    const number = Number(article.dataset.turn);
    article.classList.toggle("later", number > now);
    if (number === now) {
      session.querySelector(".asof output").textContent =
        `${now} of ${session.dataset.turns}: ${article.dataset.live} of ${article.dataset.length} tokens live`;
    }
  }
  for (const run of session.querySelectorAll("[data-g]")) run.classList.toggle("d", Number(run.dataset.g) <= now);
  for (const run of session.querySelectorAll("[data-x]")) run.classList.toggle("x", Number(run.dataset.x) <= now);
}

function nextWanted(step) {
  const marks = [...document.querySelectorAll(".text [data-w]")];
  if (!marks.length) return;
  let at = marks.indexOf(cursor);
  if (at < 0 && step < 0) at = 0;
  reveal(marks[(at + step + marks.length) % marks.length]);
}

function sessionInView() {
  const sessions = [...document.querySelectorAll(".session")];
  const focused = document.activeElement && document.activeElement.closest(".session");
  return focused || sessions.findLast((session) => session.getBoundingClientRect().top < innerHeight / 2) || sessions[0];
}

function setScores(on) {
  document.body.classList.toggle("scores", on);
  document.getElementById("scores").checked = on;
}

document.getElementById("scores").addEventListener("change", (event) => setScores(event.target.checked));
document.addEventListener("input", (event) => {
  if (event.target.matches(".asof input")) showAsOf(event.target.closest(".session"), event.target.value);
});
for (const kind of ["click", "mouseover"]) {
  document.addEventListener(kind, (event) => {
    const run = event.target.closest(".text .t");
    if (run) point(run);
    else if (kind === "click" || !document.activeElement.closest(".text")) point(null);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const text = event.target.closest(".text");
  const steps = { ArrowRight: 1, ArrowLeft: -1 };
  if (text && event.key in steps) {
    const inside = cursor && text.contains(cursor);
    const next = inside ? (event.key === "ArrowRight" ? cursor.nextElementSibling : cursor.previousElementSibling) : text.firstElementChild;
    if (next) { point(next); next.scrollIntoView({ block: "nearest" }); }
    event.preventDefault();
  } else if (event.key === "Escape") point(null);
  else if (event.key === "n") nextWanted(1);
  else if (event.key === "p") nextWanted(-1);
  else if (event.key === "s") setScores(!document.body.classList.contains("scores"));
  else if (event.key === "[" || event.key === "]") {
    const session = sessionInView();
    if (session) showAsOf(session, Number(session.querySelector(".asof input").value) + (event.key === "]" ? 1 : -1));
  }
});
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll(".session details:not([open])")];
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => { for (const details of opened) details.open = false; });
