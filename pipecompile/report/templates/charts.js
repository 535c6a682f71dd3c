"use strict";
// Charts over time with a row for each rank. All of them show the same part of the step.
// time_charts.py writes the data; timeline.js and memory.js draw the rows.

const MARGIN = { left: 58, right: 68, top: 4, bottom: 22 };
const FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif";

// -- data

let data;

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const { readable, writable } = new DecompressionStream("deflate");
  const writer = writable.getWriter();
  writer.write(bytes);
  writer.close();
  return new Response(readable).json();
}

// Returns the actions of a rank from their columns.
function actionsOf([stages, kinds, microbatches, waits, lengths]) {
  let end = 0;
  return stages.map((stage, index) => {
    const start = end + waits[index];
    end = start + lengths[index];
    return { stage, kind: kinds[index], microbatch: microbatches[index], start, end };
  });
}

// Returns the sums of the first 1, 2, 3, … numbers.
function sums(changes) {
  let total = 0;
  return changes.map((change) => (total += change));
}

const keyOf = (action) => `${action.stage}${action.kind}${action.microbatch}`;

// -- texts

// Returns the unit in which a time reads best, and how many nanoseconds or relative units it is.
function unitOf(time) {
  return data.units.find(([, scale]) => time >= scale) ?? data.units.at(-1);
}

function timeText(time, [unit, scale] = unitOf(time)) {
  return `${(time / scale).toFixed(scale > 1 ? 3 : 0)} ${unit}`;
}

// Returns both ends of a time and its length, in the unit of the length: short ones are seen too.
function spanText({ start, end }) {
  const unit = unitOf(end - start);
  const [from] = timeText(start, unit).split(" ");
  return `${from} to ${timeText(end, unit)}, ${timeText(end - start, unit)} long`;
}

function sizeText(bytes) {
  for (const [name, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(1)} ${name}`;
  }
  return `${bytes} B`;
}

function actionText({ kind, microbatch }) {
  const name = data.kinds[kind];
  return microbatch === null ? name : `${name} of microbatch ${microbatch}`;
}

// -- the part of the step that all charts show, and the action that is looked at

const view = {
  from: 0,
  to: 1,
  selected: null,
  charts: [],
  drawing: false,

  show(from, to) {
    const span = Math.min(Math.max(to - from, data.length / 1e5), data.length);
    this.from = Math.max(0, Math.min(from, data.length - span));
    this.to = this.from + span;
    this.draw();
  },

  // Shows `factor` times as much, with `time` where it is.
  zoom(factor, time = (this.from + this.to) / 2) {
    this.show(time - (time - this.from) * factor, time + (this.to - time) * factor);
  },

  all() {
    this.show(0, data.length);
  },

  // Moves as far as it takes to show an action.
  reveal({ start, end }) {
    const span = this.to - this.from;
    if (end > this.to) this.show(end - 0.8 * span, end + 0.2 * span);
    else if (start < this.from) this.show(start - 0.2 * span, start + 0.8 * span);
  },

  select(action) {
    if (this.selected === action) return;
    this.selected = action;
    this.draw();
  },

  // Several changes between two frames are drawn once.
  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => this.drawNow());
  },

  drawNow() {
    this.drawing = false;
    colours.clear();
    for (const chart of this.charts) chart.draw();
    const whole = this.to - this.from >= data.length;
    document.getElementById("shown").textContent = whole
      ? `whole step: ${timeText(data.length)}`
      : spanText({ start: this.from, end: this.to });
  },
};

// -- a chart

// Colours by their names in style.css. Each is looked up once a drawing: they differ in the dark.
const colours = new Map();

function colourOf(name) {
  if (!colours.has(name)) {
    const style = getComputedStyle(document.documentElement);
    colours.set(name, style.getPropertyValue(`--${name}`).trim());
  }
  return colours.get(name);
}

// Returns 1, 2 or 5 times a power of ten that is at least `least`.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

class TimeChart {
  // `ranks` has the actions of each rank; a subclass draws a row and describes an action in it.
  constructor(canvas, ranks, [least, most, all]) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.ranks = ranks;
    this.row = Math.round(Math.max(least, Math.min(most, all / ranks.length)));
    this.place = null; // rank and index of the action that the keyboard has gone to
    this.listen();
  }

  get inner() {
    return this.width - MARGIN.left - MARGIN.right;
  }

  x(time) {
    return MARGIN.left + (this.inner * (time - view.from)) / (view.to - view.from);
  }

  time(x) {
    return view.from + ((x - MARGIN.left) / this.inner) * (view.to - view.from);
  }

  top(rank) {
    return MARGIN.top + this.row * rank;
  }

  draw() {
    const height = this.top(this.ranks.length) + MARGIN.bottom;
    this.width = this.canvas.parentElement.clientWidth;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = this.width * devicePixelRatio;
    this.canvas.height = height * devicePixelRatio;
    this.pen.scale(devicePixelRatio, devicePixelRatio);
    this.drawAxis();
    this.drawRanks();
  }

  write(text, x, y, align, name = "soft", size = 11) {
    this.pen.font = `${size}px ${FONT}`;
    this.pen.textAlign = align;
    this.pen.textBaseline = "middle";
    this.pen.fillStyle = colourOf(name);
    this.pen.fillText(text, x, y);
  }

  drawAxis() {
    const bottom = this.top(this.ranks.length);
    const [unit, scale] = unitOf(view.to);
    const step = roundStep((((view.to - view.from) / scale) * 80) / this.inner);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    this.pen.fillStyle = colourOf("grid");
    const ticks = [];
    for (let n = Math.ceil(view.from / scale / step); ; n += 1) {
      const time = n * step * scale;
      if (time > view.to) break;
      ticks.push([this.x(time), (n * step).toFixed(digits)]);
    }
    for (const [x] of ticks) this.pen.fillRect(x, MARGIN.top, 1, bottom - MARGIN.top);
    for (const [x, label] of ticks) this.write(label, x, bottom + 12, "center");
    this.write(unit, this.width - 4, bottom + 12, "right");
  }

  drawRanks() {
    const gap = Math.min(2, this.row / 8);
    const size = Math.min(11, this.row - 1);
    for (const [rank, actions] of this.ranks.entries()) {
      const top = this.top(rank);
      const middle = top + this.row / 2;
      this.pen.fillStyle = colourOf("track");
      this.pen.fillRect(MARGIN.left, top + gap, this.inner, this.row - 2 * gap);
      this.pen.save();
      this.pen.beginPath();
      this.pen.rect(MARGIN.left, top, this.inner, this.row);
      this.pen.clip();
      this.drawRow(rank, this.visible(actions), top + gap, this.row - 2 * gap);
      this.pen.restore();
      this.write(`rank ${rank}`, MARGIN.left - 6, middle, "right", "ink", size);
      this.write(this.note(rank), this.width - 4, middle, "right", "ink", size);
    }
  }

  // Returns the actions of which a part is shown, and the ones beside them.
  visible(actions) {
    const first = Math.max(0, this.indexAt(actions, view.from));
    return actions.slice(first, this.indexAt(actions, view.to) + 2);
  }

  // Returns the index of the last action that begins at a time or before it, -1 if none does.
  indexAt(actions, time) {
    let low = 0;
    let high = actions.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (actions[middle].start <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  // -- pointer and keyboard

  listen() {
    const { canvas } = this;
    const on = (name, act) => canvas.addEventListener(name, act.bind(this));
    on("pointerdown", this.onPress);
    on("pointermove", this.onMove);
    on("pointerleave", this.onLeave);
    on("keydown", this.onKey);
    on("focus", () => this.go(this.place ?? { rank: 0, index: 0 }));
    on("blur", this.onLeave);
    for (const name of ["pointerup", "pointercancel"]) on(name, () => (this.drag = null));
    canvas.addEventListener("wheel", this.onWheel.bind(this), { passive: false });
  }

  onPress(event) {
    // Focus by pointer: the action under it is shown, and not the one of the keyboard.
    event.preventDefault();
    this.place = this.placeAt(event) ?? this.place;
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, from: view.from, span: view.to - view.from };
  }

  onMove(event) {
    if (this.drag) {
      const { x, from, span } = this.drag;
      const moved = ((event.offsetX - x) / this.inner) * span;
      view.show(from - moved, from - moved + span);
      return;
    }
    const place = this.placeAt(event);
    if (!place) {
      this.onLeave();
      return;
    }
    const action = this.ranks[place.rank][place.index];
    view.select(action);
    showHint(this.describe(place.rank, place.index), event.clientX, event.clientY);
  }

  onLeave() {
    view.select(null);
    hideHint();
  }

  // The wheel scrolls the page, unless the chart has the focus or Ctrl is held.
  onWheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    const towards = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const part = (event.deltaX / this.inner) * (view.to - view.from);
    if (towards) view.show(view.from + part, view.to + part);
    else view.zoom(2 ** (event.deltaY / 240), this.time(event.offsetX));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { rank, index } = this.place ?? { rank: 0, index: 0 };
    const action = this.ranks[rank][index];
    const middle = action ? (action.start + action.end) / 2 : undefined;
    const acts = {
      ArrowLeft: () => this.go({ rank, index: index - 1 }),
      ArrowRight: () => this.go({ rank, index: index + 1 }),
      ArrowUp: () => this.goBeside(rank - 1, middle),
      ArrowDown: () => this.goBeside(rank + 1, middle),
      Home: () => this.go({ rank, index: 0 }),
      End: () => this.go({ rank, index: this.ranks[rank].length - 1 }),
      "+": () => this.zoomBy(1 / 1.5, middle),
      "=": () => this.zoomBy(1 / 1.5, middle),
      "-": () => this.zoomBy(1.5, middle),
      0: () => view.all(),
      Escape: () => {
        view.all();
        this.onLeave();
      },
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    acts[event.key]();
  }

  zoomBy(factor, time) {
    view.zoom(factor, time);
    this.go(this.place);
  }

  goBeside(rank, time) {
    if (rank in this.ranks) this.go({ rank, index: this.indexAt(this.ranks[rank], time) });
  }

  // Goes to the nearest action of a rank, shows it and describes it.
  go(place) {
    if (!place) return;
    const { rank } = place;
    const index = Math.max(0, Math.min(place.index, this.ranks[rank].length - 1));
    const action = this.ranks[rank][index];
    if (!action) return;
    this.place = { rank, index };
    view.reveal(action);
    view.select(action);
    const middle = this.top(rank) + this.row / 2;
    const y = () => this.canvas.getBoundingClientRect().top + middle;
    if (y() < 0 || y() > innerHeight) scrollBy(0, y() - innerHeight / 2);
    const x = this.canvas.getBoundingClientRect().left + this.x((action.start + action.end) / 2);
    showHint(this.describe(rank, index), x, y());
  }

  placeAt({ offsetX, offsetY }) {
    const rank = Math.floor((offsetY - MARGIN.top) / this.row);
    const time = this.time(offsetX);
    if (!(rank in this.ranks) || time < view.from || time > view.to) return null;
    const index = this.indexAt(this.ranks[rank], time);
    return index < 0 || !this.covers(rank, index, time) ? null : { rank, index };
  }
}
