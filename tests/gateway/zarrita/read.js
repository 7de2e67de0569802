// Open an array of a served snapshot and read a part: `node read.js FOLDER URL ARRAY [TOKEN]`.
// FOLDER is where zarrita is installed.
// Prints what was read, and the requests that it took, as one JSON document.
import { pathToFileURL } from "node:url";

const [place, url, name, token] = process.argv.slice(2);
const zarr = await import(pathToFileURL(`${place}/node_modules/zarrita/dist/src/index.js`).href);

const requests = [];
const fetched = globalThis.fetch;
globalThis.fetch = async (resource, options) => {
  const reply = await fetched(resource, options);
  const target = typeof resource === "string" ? resource : (resource.url ?? resource.href);
  requests.push([new URL(target).pathname, reply.status]);
  return reply;
};

const headers = token === undefined ? {} : { Authorization: `Bearer ${token}` };
const plain = new zarr.FetchStore(url, { overrides: { headers } });
const store = await zarr.withConsolidatedMetadata(plain, { format: "v3" });
const array = await zarr.open.v3(zarr.root(store).resolve(name), { kind: "array" });
const part = await zarr.get(array, [0, zarr.slice(0, 3), null]);
console.log(
  JSON.stringify({
    shape: array.shape,
    contents: store.contents().map((it) => it.path),
    part: { shape: part.shape, data: Array.from(part.data) },
    requests,
  }),
);
