// Prints the events of probes, then what became of all that fired.
//
//   node follow.js unix:/run/stapsdtd/stapsdtd.sock COUNT SELECTOR...
//   4711  postgresql:query__start  BEGIN;
//   fired 3, delivered 3, filtered 0

"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const PROTO = path.join(__dirname, "..", "..", "proto");

function connect(address) {
  const options = {
    includeDirs: [PROTO],
    defaults: true, // fields that are 0 are not sent
    oneofs: true, // value.kind names the one that is set
    longs: String, // a number of JavaScript has 53 bits
    enums: String,
  };
  const definition = loader.loadSync("stapsdtd/v1/stapsdt.proto", options);
  const { StapsdtService } = grpc.loadPackageDefinition(definition).stapsdtd.v1;
  return new StapsdtService(address, grpc.credentials.createInsecure());
}

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

function text(value) {
  const found = value[value.kind];
  return Buffer.isBuffer(found) ? found.toString() : String(found);
}

async function follow(address, count, selectors) {
  const client = connect(address);
  // armed when this returns
  const { subscriptionId } = await call(client, "Subscribe", { selectors });
  const sites = new Map();
  let left = count;
  for await (const response of client.Stream({ subscriptionId, encoding: "ENCODING_ROWS" })) {
    switch (response.payload) {
      case "descriptions": // of a site, before its first event
        for (const { probe } of response.descriptions.probes) {
          for (const site of probe.sites) sites.set(site.siteId, `${probe.provider}:${probe.name}`);
        }
        break;
      case "rows":
        for (const event of response.rows.events) {
          console.log([event.pid, sites.get(event.siteId), ...event.values.map(text)].join("  "));
        }
        if (left > 0 && (left -= response.rows.events.length) <= 0) {
          // the stream goes on with what fired until then, and closes with an End
          await call(client, "Unsubscribe", { subscriptionId });
        }
        break;
      case "loss":
        console.error(`${response.loss.count} events lost: ${response.loss.stage}`);
        break;
      case "end": {
        const { fired, delivered, filtered } = response.end.account;
        console.log(`fired ${fired}, delivered ${delivered}, filtered ${filtered}`);
        break;
      }
    }
  }
  client.close();
}

const [address, count, ...selectors] = process.argv.slice(2);
follow(address, Number(count), selectors).catch((error) => {
  console.error(error.details || error.message);
  process.exitCode = 1;
});
