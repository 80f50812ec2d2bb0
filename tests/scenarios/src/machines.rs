//! The sorts of machine that a scenario is run on.
//!
//! A [`Sort`] is what processors walk and whose tables devices walk. A file may leave both
//! open, and is run on one machine of each sort then.

use host::{CpuTables, Layout};

use crate::format::{Cpus, Machine, Tables};

/// What processors walk and whose tables devices walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sort {
    pub(crate) cpus: CpuTables,
    pub(crate) layout: Layout,
}

/// What processors walk in files that leave it open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Open {
    /// EPT.
    #[default]
    Ept,
    /// NPT.
    Npt,
    /// Once EPT, once NPT.
    Both,
}

impl Sort {
    /// All that a file asks for.
    pub(crate) fn of(machine: &Machine, open: Open) -> Vec<Self> {
        let sort = |cpus, layout| Self { cpus, layout };
        let shared = sort(CpuTables::Ept, Layout::Shared);
        if machine.accessed {
            return vec![sort(CpuTables::MarkedEpt, Layout::Separate)];
        }
        let ept = match machine.tables {
            Tables::Both => vec![sort(CpuTables::Ept, Layout::Separate), shared],
            Tables::Separate => vec![sort(CpuTables::Ept, Layout::Separate)],
            Tables::Shared => vec![shared],
        };
        let npt = sort(CpuTables::Npt, Layout::Separate);
        match (machine.cpus, open) {
            (Cpus::Npt, _) => vec![npt],
            (Cpus::Any, Open::Npt) if machine.tables != Tables::Shared => vec![npt],
            (Cpus::Any, Open::Both) if machine.tables != Tables::Shared => {
                ept.into_iter().chain([npt]).collect()
            }
            (Cpus::Ept | Cpus::Any, _) => ept,
        }
    }

    /// In words.
    pub(crate) fn name(self) -> &'static str {
        match (self.cpus, self.layout) {
            (_, Layout::Shared) => "shared tables",
            (CpuTables::Ept, Layout::Separate) => "separate tables",
            (CpuTables::MarkedEpt, Layout::Separate) => "separate tables with accessed flags",
            (CpuTables::Npt, Layout::Separate) => "separate tables, NPT",
        }
    }
}

/// Why there is no such machine, if there is none.
pub(crate) fn impossible(machine: &Machine) -> Option<&'static str> {
    let shared = machine.tables == Tables::Shared;
    let npt = machine.cpus == Cpus::Npt;
    match (machine.accessed, npt, shared) {
        (_, true, true) => Some(
            "machine.tables is `shared` and machine.cpus `npt`: VT-d cannot walk NPT; \
             expected `separate` or `both`",
        ),
        (true, true, _) => Some(
            "machine.accessed goes by the flags of EPT; expected machine.cpus to be `ept` or \
             absent",
        ),
        (true, _, true) => Some(
            "machine.accessed goes by what CPUs mark, which devices do not; expected \
             machine.tables to be `separate` or `both`",
        ),
        (_, false, _) if machine.asids.is_some() || machine.flush_by_asid.is_some() => {
            Some("machine.asids and machine.flush_by_asid need machine.cpus to be `npt`")
        }
        (_, _, _) => None,
    }
}
