//! Guests of a few instructions.

mod programs;

pub(crate) use programs::Program;
