//! One suite over all formats and all walks.
//!
//! `arena` is plain memory that checks how it is used, `plain` a format of our own with
//! tables as small as we like, `log` a record that a test can read.

mod arena;
mod arm64;
mod chunks;
mod counts;
mod ends;
mod every;
mod flushes;
mod formats;
mod interrupted;
mod log;
mod maps;
mod pages;
mod path;
mod plain;
mod reference;
mod splits;
mod stops;
mod stretches;
mod teardowns;
mod tracked;
