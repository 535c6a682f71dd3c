"use strict";
// The box with details of what the pointer is on, or of what has the keyboard's focus.

const hintBox = document.getElementById("hint");

// Shows lines of text beside a place in the window, and inside of the window. The box scrolls with
// the page, since the focus may make that scroll.
function showHint(text, x, y) {
  hintBox.textContent = text;
  hintBox.hidden = false;
  const { width, height } = hintBox.getBoundingClientRect();
  const right = document.documentElement.clientWidth;
  const left = x + 14 + width > right ? x - 14 - width : x + 14;
  const top = y + 14 + height > innerHeight ? y - 14 - height : y + 14;
  hintBox.style.left = `${scrollX + Math.max(4, Math.min(left, right - width - 4))}px`;
  hintBox.style.top = `${scrollY + Math.max(4, top)}px`;
}

function hideHint() {
  hintBox.hidden = true;
}

function hinted(event) {
  return event.target instanceof Element ? event.target.closest("[data-hint]") : null;
}

document.addEventListener("pointermove", (event) => {
  const part = hinted(event);
  if (part) showHint(part.dataset.hint, event.clientX, event.clientY);
});

document.addEventListener("pointerout", (event) => {
  if (hinted(event)) hideHint();
});

document.addEventListener("focusin", (event) => {
  const part = hinted(event);
  if (!part) return;
  const place = part.getBoundingClientRect();
  showHint(part.dataset.hint, place.left + Math.min(place.width, 20), place.bottom - 10);
});

document.addEventListener("focusout", hideHint);

// The parts of a chart are one stop of the Tab key; arrow keys go from part to part in it.
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideHint();
  const part = hinted(event);
  if (!part) return;
  const parts = [...part.closest(".parts").querySelectorAll("[data-hint]")];
  const rows = [...new Set(parts.map((each) => each.parentElement))];
  const rowBeside = (step) => {
    const row = rows[rows.indexOf(part.parentElement) + step];
    return row && row.querySelector("[data-hint]");
  };
  const goals = {
    ArrowLeft: () => parts[parts.indexOf(part) - 1],
    ArrowRight: () => parts[parts.indexOf(part) + 1],
    ArrowUp: () => rowBeside(-1),
    ArrowDown: () => rowBeside(1),
    Home: () => parts[0],
    End: () => parts[parts.length - 1],
  };
  if (!(event.key in goals)) return;
  event.preventDefault();
  const goal = goals[event.key]();
  if (!goal) return;
  part.tabIndex = -1;
  goal.tabIndex = 0;
  goal.focus();
});
