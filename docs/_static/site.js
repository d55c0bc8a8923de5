// What scrolls sideways must be reachable by the keyboard, and nothing else should take a stop.
"use strict";

// A table of more than 40 rows gets a field that hides the rows without its words.
function addFilter(table) {
  const rows = [...table.tBodies[0].rows], texts = rows.map((row) => row.textContent.toLowerCase());
  const field = document.createElement("input"), count = document.createElement("span"), box = document.createElement("div");
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    rows.forEach((row, at) => { row.hidden = !words.every((word) => texts[at].includes(word)); });
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  field.type = "search";
  field.placeholder = "Filter rows";
  field.setAttribute("aria-label", "Filter rows of the table");
  field.addEventListener("input", show);
  count.setAttribute("role", "status");
  box.className = "row-filter";
  box.append(field, count);
  (table.closest(".table-wrapper") ?? table).before(box);
  show();
}

// On a phone the rows of a wide table are cards (site.css); each cell has the name of its column.
function nameCells(table) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  table.classList.add("cards");
  for (const row of table.tBodies[0].rows) for (const [at, cell] of [...row.cells].entries()) {
    cell.dataset.label = names[at];
    cell.classList.toggle("empty", !cell.textContent.trim());
  }
}

addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    if (table.tHead?.rows[0].cells.length > 3 && table.tBodies.length) nameCells(table);
    if (table.tBodies[0]?.rows.length > 40) addFilter(table);
  }
  const reach = () => {
    for (const box of document.querySelectorAll(".highlight pre, .table-wrapper, .picture")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  reach();
  addEventListener("resize", reach);
  addEventListener("toggle", reach, true);
});
