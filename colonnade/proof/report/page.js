"use strict";
// On every page: light or dark, and the hint next to the pointer.
const root = document.documentElement;
const hint = document.querySelector(".hint");

function showHint(text, x, y) {
  hint.hidden = !text;
  if (!text) return;
  hint.textContent = text;
  const box = hint.getBoundingClientRect();
  hint.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
  hint.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}

document.querySelector("[data-toggle=theme]").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.dispatchEvent(new Event("themechange"));
});

for (const cells of document.querySelectorAll("[data-hints]")) {
  const said = event => { const cell = event.target.closest("[data-hint]"); showHint(cell ? cell.dataset.hint : "", event.clientX, event.clientY); };
  cells.addEventListener("pointermove", said);
  cells.addEventListener("pointerleave", () => showHint(""));
}
