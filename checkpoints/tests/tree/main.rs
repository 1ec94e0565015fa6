//! The prefix tree from outside: its rules by name, and random histories beside a plain list.

mod attention;
mod ghosts;
mod leaving;
mod model;
mod policy;
mod rules;
mod support;
mod twin;
