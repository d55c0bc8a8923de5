"use strict";
// What the reader can do with a page: choose light or dark, point at a value, hide a series.
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

for (const chart of document.querySelectorAll(".pygal-chart")) {
  const legends = chart.closest(".chart").querySelectorAll("[data-serie]");
  const name = mark => {
    const at = [...mark.closest(".series").classList].find(each => each.startsWith("serie-")).slice(6);
    return legends[at].textContent;
  };
  chart.addEventListener("pointermove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    let near = null, least = 28 * 28;
    for (const mark of chart.querySelectorAll(".series:not(.off) .tooltip-trigger")) {
      const box = mark.getBBox(), shift = mark.closest(".plot").transform.baseVal[0].matrix;
      const dx = Math.max(box.x + shift.e - at.x, 0, at.x - box.x - shift.e - box.width);
      const dy = Math.max(box.y + shift.f - at.y, 0, at.y - box.y - shift.f - box.height);
      const far = dx * dx * 4 + dy * dy;
      if (far < least) { near = mark; least = far; }
    }
    chart.querySelectorAll(".near").forEach(mark => mark.classList.remove("near"));
    if (near) near.classList.add("near");
    const value = near && near.parentElement.querySelector("desc.value");
    showHint(value ? `${name(near)}\n${value.textContent}` : "", event.clientX, event.clientY);
  });
  chart.addEventListener("pointerleave", () => {
    chart.querySelectorAll(".near").forEach(mark => mark.classList.remove("near"));
    showHint("");
  });
  for (const legend of legends) {
    legend.addEventListener("click", () => {
      const off = legend.classList.toggle("off");
      chart.querySelectorAll(`.series.serie-${legend.dataset.serie}`).forEach(part => part.classList.toggle("off", off));
    });
  }
}

for (const cells of document.querySelectorAll("[data-hints]")) {
  const said = event => { const cell = event.target.closest("[data-hint]"); showHint(cell ? cell.dataset.hint : "", event.clientX, event.clientY); };
  cells.addEventListener("pointermove", said);
  cells.addEventListener("pointerleave", () => showHint(""));
}
