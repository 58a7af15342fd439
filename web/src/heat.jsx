// What heat maps share: cells out of an answer, their colours and what these stand for.
import { useEffect, useRef } from "preact/hooks";

import { colours, rgb, shade } from "./colours.js";
import { number } from "./words.js";

export const [NOTHING, VALUE, UNDEFINED, INF, NAN] = [0, 1, 2, 3, 4];

export function unpacked(text, Kind) {
  const packed = atob(text);
  const bytes = new Uint8Array(packed.length);
  // Uint8Array.from would call a function for each of two million bytes.
  for (let at = 0; at < packed.length; at += 1) bytes[at] = packed.charCodeAt(at);
  return new Kind(bytes.buffer);
}

// map: {num_columns, values, states}, row by row; what is not a value has a colour of its own.
export function paint(canvas, map, numRows, scale) {
  const tones = colours();
  const ratio = devicePixelRatio || 1;
  const rowPx = canvas.clientHeight / numRows;
  const width = Math.max(map.num_columns, Math.round(canvas.clientWidth * ratio));
  const height = Math.max(numRows, Math.round(canvas.clientHeight * ratio));
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const word = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  const shades = Array.from({ length: 1024 }, (_, at) => word(shade(at / 1023)));
  const special = { [NOTHING]: 0, [UNDEFINED]: word(rgb(tones.undefined)), [INF]: word(rgb(tones.inf)), [NAN]: word(rgb(tones.nan)) };
  // Each column takes at least one pixel of the screen: there are never more columns than pixels.
  const from = Int32Array.from({ length: map.num_columns + 1 }, (_, at) => Math.floor((at * width) / map.num_columns));
  for (let row = 0; row < numRows; row += 1) {
    const [top, bottom] = [Math.floor((row * height) / numRows), Math.floor(((row + 1) * height) / numRows)];
    const line = new Uint32Array(width);
    for (let column = 0; column < map.num_columns; column += 1) {
      const cell = row * map.num_columns + column;
      const state = map.states[cell];
      const colour = state === VALUE ? shades[Math.round(1023 * Math.min(1, scale.share(map.values[cell])))] : special[state];
      line.fill(colour, from[column], from[column + 1]);
    }
    const gap = rowPx >= 6 ? 1 : 0;
    for (let y = top; y < Math.max(top + 1, bottom - gap); y += 1) pixels.set(line, y * width);
  }
  context.putImageData(image, 0, 0);
}

export function Legend({ scale, unit }) {
  const canvas = useRef(null);
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    for (let x = 0; x < canvas.current.width; x += 1) {
      context.fillStyle = `rgb(${shade(x / canvas.current.width).join(",")})`;
      context.fillRect(x, 0, 1, canvas.current.height);
    }
  }, []);
  return (
    <p class="legend muted">
      <span>{number(scale.low, 3)}</span>
      <canvas ref={canvas} class="scale" width={180} height={12} role="img" aria-label="Colours from small to large" />
      <span>{number(scale.high, 3)}{unit} ({scale.isLog ? "logarithm, " : ""}1 % to 99 % of what is in view); to white: {number(scale.most, 3)}</span>
      <span><i class="swatch nan" /> NaN</span><span><i class="swatch inf" /> infinity</span><span><i class="swatch undefined" /> not defined</span><span><i class="swatch nothing" /> not measured</span>
    </p>
  );
}

export function Choice({ label, value, options, onChange }) {
  return (
    <label>{label} <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
      {options.map(([name, words]) => <option key={name} value={name}>{words}</option>)}
    </select></label>
  );
}
