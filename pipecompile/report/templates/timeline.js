"use strict";
// What ranks run.

class Timeline extends TimeChart {
  constructor(canvas, index) {
    const { name, idle, recompute, ranks } = data.timelines[index];
    super(canvas, ranks.map(actionsOf), [12, 32, 620]);
    Object.assign(this, { name, idle, recompute });
    this.byKey = new Map(this.ranks.flat().map((action) => [keyOf(action), action]));
    // Stages of one rank are drawn like stairs: the first one as high as the row.
    this.steps = this.ranks.map((actions) => {
      const stages = [...new Set(actions.map((action) => action.stage))].sort((a, b) => a - b);
      return new Map(stages.map((stage, step) => [stage, (0.55 * step) / stages.length]));
    });
  }

  note(rank) {
    return `${(100 * this.idle[rank]).toFixed(1)}%`;
  }

  covers(rank, index, time) {
    return time <= this.ranks[rank][index].end;
  }

  drawRow(rank, actions, top, height) {
    for (const action of actions) {
      const low = height * this.steps[rank].get(action.stage);
      this.drawAction(action, top + low, height - low);
    }
  }

  drawAction(action, top, height) {
    const left = this.x(action.start);
    const width = this.x(action.end) - left;
    const gap = Math.min(0.5, width / 8);
    const share = action.kind === "B" ? this.recompute[action.stage] ?? 0 : 0;
    this.pen.fillStyle = colourOf(action.kind);
    this.pen.fillRect(left + gap, top, width - 2 * gap, height);
    if (share) this.hatch(left + gap, top, width * share - gap, height);
    if (action.kind === "R") this.hatch(left + gap, top, width - 2 * gap, height);
    const chosen = view.selected;
    if (chosen && chosen.microbatch === action.microbatch) {
      this.pen.strokeStyle = colourOf("ink");
      this.pen.lineWidth = keyOf(chosen) === keyOf(action) ? 3 : 1.5;
      this.pen.strokeRect(left + 0.5, top + 0.5, Math.max(width - 1, 1), height - 1);
    }
    const label = `${action.microbatch}`;
    const size = height > 15 ? 11 : height - 2;
    if (width * (1 - share) > 0.62 * size * label.length + 3 && size > 7) {
      const name = action.kind === "R" ? "on-recompute" : "on-bar";
      this.write(label, left + (width * (1 + share)) / 2, top + height / 2, "center", name, size);
    }
  }

  // A recompute is a forward once more: the colour of forwards, hatched.
  hatch(left, top, width, height) {
    if (width <= 0) return;
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(left, top, width, height);
    this.pen.clip();
    this.pen.fillStyle = colourOf("recompute-light");
    this.pen.fillRect(left, top, width, height);
    this.pen.strokeStyle = colourOf("F");
    this.pen.lineWidth = 2;
    this.pen.beginPath();
    for (let x = left - height; x < left + width; x += 6) {
      this.pen.moveTo(x, top + height);
      this.pen.lineTo(x + height, top);
    }
    this.pen.stroke();
    this.pen.restore();
  }

  describe(rank, index) {
    const action = this.ranks[rank][index];
    const lines = [
      `rank ${rank}, stage ${action.stage}: ${actionText(action)}`,
      `${this.name}: ${spanText(action)}`,
    ];
    for (const other of view.charts) {
      const same = other !== this && other.byKey?.get(keyOf(action));
      if (same) lines.push(`${other.name}: ${spanText(same)}`);
    }
    return lines.join("\n");
  }
}
