"use strict";
// Loaded before Azurite. Ten minutes after its start, and again every ten, Azurite looks for data
// that no blob has any more, and while it lets go of some ten thousand pieces, one by one and sorting
// all of them each time, it answers nobody for many minutes. A server that lives as long as a test
// run needs none of that.
const path = require("node:path");

const blob = path.dirname(process.argv[1]);
const { default: BlobGCManager } = require(path.join(blob, "gc", "BlobGCManager.js"));
for (const name of ["start", "close"]) {
  if (typeof BlobGCManager.prototype[name] !== "function") throw new Error(`There is no ${name}().`);
}
BlobGCManager.prototype.start = async () => undefined;
BlobGCManager.prototype.close = async () => undefined;
