//! The HTTP server as clients meet it: the real program with the embedded model, over a socket.
#![cfg(feature = "embedded-model")]

#[path = "support/program.rs"]
#[allow(dead_code)] // it serves the tests of the command line too
mod program;

#[path = "server/bodies.rs"]
mod bodies;
#[path = "server/cancel.rs"]
mod cancel;
#[path = "server/cli.rs"]
mod cli;
#[path = "server/fields.rs"]
mod fields;
#[path = "server/guard.rs"]
mod guard;
#[path = "server/kept.rs"]
mod kept;
#[path = "server/load.rs"]
mod load;
#[path = "server/logprobs.rs"]
mod logprobs;
#[path = "server/messages.rs"]
mod messages;
#[path = "server/metrics.rs"]
mod metrics;
#[path = "server/openapi.rs"]
mod openapi;
#[path = "server/page.rs"]
mod page;
#[path = "server/queue.rs"]
mod queue;
#[path = "server/start.rs"]
mod start;
#[path = "server/streams.rs"]
mod streams;
#[path = "server/support.rs"]
#[allow(dead_code)] // not every area needs all of it
mod support;
#[path = "server/tools.rs"]
mod tools;
