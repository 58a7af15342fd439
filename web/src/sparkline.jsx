import { useEffect, useRef } from "preact/hooks";

import { colours } from "./colours.js";
import { number } from "./words.js";

const WIDTH = 180;
const HEIGHT = 34;

// points: [[attempt, step, value], ...]; a value that is not finite is null, and a mark over the whole height.
export function Sparkline({ points, name }) {
  const canvas = useRef(null);
  const finite = points.map((one) => one[2]).filter((one) => one !== null);
  const bad = points.length - finite.length;
  const last = points.at(-1)?.[2];
  useEffect(() => {
    const ratio = devicePixelRatio || 1;
    const own = canvas.current;
    own.width = WIDTH * ratio;
    own.height = HEIGHT * ratio;
    const context = own.getContext("2d");
    context.scale(ratio, ratio);
    const tones = colours();
    const [least, most] = [Math.min(...finite), Math.max(...finite)];
    const x = (at) => 2 + ((WIDTH - 4) * at) / Math.max(1, points.length - 1);
    const y = (value) => HEIGHT - 3 - ((HEIGHT - 6) * (value - least)) / (most - least || 1);
    context.strokeStyle = tones.line;
    context.lineWidth = 1.4;
    context.beginPath();
    let isDown = false;
    points.forEach(([, , value], at) => {
      if (value === null) isDown = false;
      else if (isDown) context.lineTo(x(at), y(value));
      else {
        context.moveTo(x(at), y(value));
        isDown = true;
      }
    });
    context.stroke();
    context.fillStyle = tones.nan;
    points.forEach(([, , value], at) => value === null && context.fillRect(x(at) - 1, 0, 2, HEIGHT));
  });
  const words = `${name} ${last === null ? "is not finite" : number(last)}${bad ? `, ${bad} of ${points.length} steps not finite` : ""}`;
  return (
    <span class="sparkline">
      <canvas ref={canvas} class="spark" role="img" aria-label={words} />
      <span class={last === null ? "critical" : ""}>{last === null ? "not finite" : number(last)}</span>
    </span>
  );
}
