//! Guests of a few instructions, and the processors that run them.
//!
//! A [`Program`] is code without addresses; a [`Runner`] is one virtual processor of a
//! domain with such a program, to be run on any processor and watched from another.

mod programs;
mod runner;
mod seat;

pub(crate) use programs::Program;
pub(crate) use runner::{Runner, meanwhile};
pub(crate) use seat::{Access, Occupant, Reached, Seat};
