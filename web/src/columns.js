// Columns of a plot: out of the history, with what is newer than it out of the daemon's memory behind it.

export function nothing() {
  return { width: 1, steps: [], least: [], greatest: [], mean: [], last: [], nans: [], infs: [] };
}

// points: [[attempt, step, value], ...] of /api/v1/series; a value that is not finite is null.
export function ofPoints(points) {
  const values = points.map((one) => one[2]);
  return {
    width: 1,
    steps: points.map((one) => one[1]),
    least: values, greatest: values, mean: values, last: values,
    nans: values.map((one) => (one === null ? 1 : 0)),
    infs: values.map(() => 0),
  };
}

export function joined(history, width, recent, [from, to]) {
  const end = history.steps.length ? history.steps.at(-1) + width - 1 : -1;
  const newer = ofPoints(recent.filter(([, step]) => step > end && step >= from && step <= to));
  return Object.fromEntries(
    Object.keys(nothing()).map((name) => [name, name === "width" ? width : [...history[name], ...newer[name]]]),
  );
}
