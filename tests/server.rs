//! The HTTP server as clients meet it: the real program with the embedded model, over a socket.
#![cfg(feature = "embedded-model")]

#[path = "support/program.rs"]
#[allow(dead_code)] // it serves the tests of the command line too
mod program;

#[path = "server/cli.rs"]
mod cli;
#[path = "server/metrics.rs"]
mod metrics;
#[path = "server/page.rs"]
mod page;
#[path = "server/start.rs"]
mod start;
#[path = "server/support.rs"]
#[allow(dead_code)] // not every area needs all of it
mod support;
