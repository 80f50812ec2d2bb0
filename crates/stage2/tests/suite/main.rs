//! One suite over all formats and all walks.
//!
//! `arena` is plain memory that checks how it is used, `plain` a format of our own with
//! tables as small as we like, `log` a record that a test can read, `lending` memory that lends its
//! tables.

mod arena;
mod arm64;
mod chunks;
mod counts;
mod ends;
mod every;
mod flushes;
mod formats;
mod interrupted;
mod lending;
mod log;
mod maps;
mod near;
mod pages;
mod path;
mod plain;
mod reference;
mod splits;
mod stops;
mod stretches;
mod teardowns;
mod tracked;
