//! A VT-d unit: registers, invalidation queue, caches, and requests through them
//!
//! A [`Unit`] starts with translation off and everything empty. Software drives it through its registers and a
//! queue in RAM, as the manual says; work goes on when somebody reads a register or time passes
//! ([`crate::Machine::tick`]), never inside the write that asked for it.

pub(crate) mod command;
pub(crate) mod config;
mod devices;
pub(crate) mod dma;
pub(crate) mod fault;
mod invalidate;
mod queue;
pub mod registers;
pub(crate) mod translate;

use crate::cache::{Leaves, Walks};
use crate::counters::UnitCounters;
use crate::failure::Lie;
use crate::ram::View;
use crate::types::UnitId;
use command::Command;
use config::UnitConfig;
use queue::Fetched;
use std::collections::{BTreeMap, VecDeque};
use translate::Context;

pub(crate) struct Unit {
    pub(crate) id: UnitId,
    pub(crate) config: UnitConfig,
    pub(crate) counters: UnitCounters,
    pub(crate) lie: Option<Lie>,
    /// Commands carried out, oldest first.
    pub(crate) log: Vec<Command>,

    // Registers.
    gsts: u32,
    root_register: u64,
    fsts: u32,
    fectl: u32,
    ics: u32,
    iectl: u32,
    ccmd: u64,
    iva: u64,
    iotlb_register: u64,
    iqh: u64,
    iqt: u64,
    iqa: u64,
    records: Vec<(u64, u64)>,
    next_record: usize,
    /// Registers with no effect (event addresses and data), by offset.
    plain: BTreeMap<u64, u32>,

    // Work in progress.
    /// The GSTS to come and the ticks until then.
    command_pending: Option<(u32, u32)>,
    register_context: Option<u32>,
    register_iotlb: Option<u32>,
    fetched: VecDeque<Fetched>,
    hung: bool,

    // What the hardware holds.
    /// Root table pointer as latched by SRTP.
    root_table: u64,
    pub(crate) contexts: BTreeMap<u16, Context>,
    pub(crate) iotlb: Leaves,
    pub(crate) walks: Walks,
}

impl Unit {
    pub(crate) fn new(id: UnitId, config: UnitConfig) -> Self {
        Self {
            id,
            config,
            counters: UnitCounters::default(),
            lie: None,
            log: Vec::new(),
            gsts: 0,
            root_register: 0,
            fsts: 0,
            fectl: registers::FECTL_IM,
            ics: 0,
            iectl: registers::FECTL_IM,
            ccmd: 0,
            iva: 0,
            iotlb_register: 0,
            iqh: 0,
            iqt: 0,
            iqa: 0,
            records: vec![(0, 0); usize::from(config.fault_records.clamp(1, 256))],
            next_record: 0,
            plain: BTreeMap::new(),
            command_pending: None,
            register_context: None,
            register_iotlb: None,
            fetched: VecDeque::new(),
            hung: false,
            root_table: 0,
            contexts: BTreeMap::new(),
            iotlb: Leaves::default(),
            walks: Walks::default(),
        }
    }

    /// How table walks of this unit see memory.
    pub(crate) fn view(&self) -> View {
        View::Unit { non_coherent: !self.config.coherent, buffered: self.config.write_buffer }
    }

    /// Lets a hung unit go on.
    pub(crate) fn repair(&mut self) {
        self.hung = false;
        for fetched in &mut self.fetched {
            fetched.hangs = false;
        }
    }
}
