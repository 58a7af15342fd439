// Colours that canvases draw with: of the style sheet, so that dark and light are decided in one place; and viridis.

const NAMES = ["line", "line2", "line3", "line4", "band", "axis", "grid", "nan", "inf", "nothing", "undefined", "critical", "warning", "info", "ink", "backward", "wgrad"];

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

export function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// Viridis at nine places (Smith and van der Walt, 2015); what is far beyond the others goes on to white.
const STOPS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"].map(rgb);
const OUTLIER = rgb("#ffffff");
export const ORDINARY = 0.9; // Part of the scale that the ordinary values take.

function between(a, b, share) {
  return a.map((one, at) => Math.round(one + (b[at] - one) * share));
}

// share: 0 to ORDINARY for ordinary values, up to 1 for outliers.
export function shade(share) {
  if (share > ORDINARY) return between(STOPS.at(-1), OUTLIER, Math.min(1, (share - ORDINARY) / (1 - ORDINARY)));
  const at = Math.max(0, share / ORDINARY) * (STOPS.length - 1);
  const low = Math.min(Math.floor(at), STOPS.length - 2);
  return between(STOPS[low], STOPS[low + 1], at - low);
}

// The scale of values in view: ordinary is what lies between the 1st and the 99th percentile, and a little beyond; so one
// spike neither hides the others' differences nor is hidden among them.
export function scaleOf(values) {
  // A plain array would be sorted as words.
  const finite = new Float64Array(values.filter(Number.isFinite)).sort();
  const at = (share) => finite[Math.min(finite.length - 1, Math.floor(share * finite.length))];
  if (!finite.length) return { low: 0, middle: 0, high: 1, least: 0, most: 0, isLog: false, share: () => 0 };
  let [low, high] = [at(0.01), at(0.99)];
  const [least, most, middle] = [finite[0], finite.at(-1), at(0.5)];
  const isLog = low > 0 && high / low > 20;
  const of = isLog ? (value) => Math.log(Math.max(value, least > 0 ? least : low)) : (value) => value;
  const room = 0.5 * (of(high) - of(low)) || Math.abs(of(high)) * 0.05 || 1;
  const [from, to, end] = [of(low), of(high) + room, of(most)];
  const share = (value) => {
    const place = of(value);
    if (place > to) return ORDINARY + (1 - ORDINARY) * (0.5 + (0.5 * (place - to)) / (end - to || 1));
    return (ORDINARY * Math.max(0, place - from)) / (to - from);
  };
  return { low, middle, high, least, most, isLog, share };
}
