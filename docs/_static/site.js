// What scrolls sideways must be reachable by the keyboard, and nothing else should take a stop.
"use strict";

addEventListener("DOMContentLoaded", () => {
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
