// Builds the page: node build.mjs [FOLDER]. The same sources and the versions of package-lock.json make the same bytes.
import { copyFileSync, mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2] ?? join(here, "..", "sentinel", "web");

mkdirSync(folder, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: "src/app.jsx" },
  outdir: folder,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "ascii",
  legalComments: "inline",
  logLevel: "warning",
});
copyFileSync(join(here, "src", "icon.svg"), join(folder, "icon.svg"));
