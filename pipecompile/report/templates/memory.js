"use strict";
// What ranks hold.

class MemoryChart extends TimeChart {
  constructor(canvas) {
    const { kinds, ranks } = data.memory;
    super(canvas, ranks.map((rank) => actionsOf(rank.actions)), [20, 72, 640]);
    this.kinds = kinds;
    this.limits = ranks;
    for (const [rank, actions] of this.ranks.entries()) {
      const held = ranks[rank].bytes.map(sums);
      actions.forEach((action, index) => {
        action.held = held.map((bytes) => bytes[index]);
        action.total = action.held.reduce((total, bytes) => total + bytes, 0);
        // A workspace is gone as soon as its action ends.
        action.between = action.total - (action.held[kinds.indexOf("workspace")] ?? 0);
      });
    }
    this.peaks = this.ranks.map((actions) => Math.max(...actions.map(({ total }) => total), 0));
    this.most = data.memory.scale;
  }

  note(rank) {
    return sizeText(this.peaks[rank]);
  }

  // Between two actions a rank holds what the later one begins with.
  covers() {
    return true;
  }

  drawRow(rank, actions, top, height) {
    const bottom = top + height;
    const y = (bytes) => bottom - (height * bytes) / this.most;
    const fill = (name, start, end, bytes) => {
      this.pen.fillStyle = name;
      // Whole pixels, or the edges of neighbours shine through.
      const [left, right] = [Math.floor(this.x(start)), Math.ceil(this.x(end))];
      this.pen.fillRect(left, y(bytes), right - left, bottom - y(bytes));
    };
    const [held, workspace] = [colourOf("held"), colourOf("workspace")];
    let before = Math.min(view.from, actions[0]?.start ?? 0);
    for (const { start, end, total, between } of actions) {
      fill(held, before, start, between);
      // What has no length in the step is drawn two pixels wide.
      const from = Math.min(start, this.time(this.x(end) - 3));
      fill(workspace, from, end, total);
      fill(held, from, end, between);
      before = end;
    }
    const { cap, bound, measured } = this.limits[rank];
    const line = (name, bytes, ...look) => {
      if (bytes !== null && bytes <= this.most) this.line(name, y(bytes), ...look);
    };
    line("cap", cap, 2, []);
    line("bound", bound, 1, [3, 3]);
    line("measured", measured, 2, [6, 2]);
    const key = view.selected && keyOf(view.selected);
    const chosen = actions.find((action) => keyOf(action) === key);
    if (chosen) {
      this.pen.fillStyle = colourOf("ink");
      this.pen.fillRect(this.x((chosen.start + chosen.end) / 2) - 0.75, top, 1.5, height);
    }
  }

  line(name, y, width, dashes) {
    this.pen.strokeStyle = colourOf(name);
    this.pen.lineWidth = width;
    this.pen.setLineDash(dashes);
    this.pen.beginPath();
    this.pen.moveTo(MARGIN.left, y);
    this.pen.lineTo(MARGIN.left + this.inner, y);
    this.pen.stroke();
    this.pen.setLineDash([]);
  }

  describe(rank, index) {
    const action = this.ranks[rank][index];
    const { cap, bound, measured } = this.limits[rank];
    const parts = this.kinds.map((kind, at) => [kind, action.held[at]]);
    return [
      `rank ${rank}: ${sizeText(action.total)} in stage ${action.stage}, ${actionText(action)}`,
      ...parts.filter(([, bytes]) => bytes).map(([kind, bytes]) => `${kind} ${sizeText(bytes)}`),
      `bound at the peak ${sizeText(bound)}${cap === null ? "" : ` of ${sizeText(cap)}`}`,
      ...(measured === null ? [] : [`measured peak ${sizeText(measured)}`]),
    ].join("\n");
  }
}
