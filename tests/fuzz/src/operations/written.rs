//! What a guest and its hypervisor do, as steps of a scenario.
//!
//! A [`Play`] writes each step down next to what the model says must come of it: the
//! status of every element, which grants are in use, and where each access goes.

use std::collections::BTreeSet;

use gnttab::{Status, abi::MapGrantRef};

use super::{Play, Reference, Shown, WINDOW, steps::Home};
use crate::sheet::{keys, names, number, numbers};

impl Shown {
    fn page(&self) -> String {
        match self.grant {
            Some((grant, _)) => format!("g{grant}"),
            None => format!("r{}", self.number),
        }
    }
}

impl Play {
    pub(super) fn write_map(
        &self,
        asked: &[(u64, u64, bool)],
        elements: &[MapGrantRef],
        first: u32,
    ) {
        let mut taken: BTreeSet<u64> = self.reference.frames.keys().copied().collect();
        let status = |(grant, at, read_only): &(u64, u64, bool)| {
            let granted = *read_only || grant % 5 != 4;
            let done = granted && taken.insert(WINDOW + at);
            if done { Status::Okay } else { Status::GeneralError }
        };
        let statuses: Vec<i16> = asked.iter().map(status).map(gnttab::Status::value).collect();
        let alter = elements.iter().enumerate().map(|(place, element)| {
            keys! {
                element: place as u32, address: number(element.host_addr), flags: element.flags,
            }
        });
        self.sheet.step("map", flushes(asked.len()), || {
            let grants: Vec<u32> = asked.iter().map(|(grant, ..)| *grant as u32).collect();
            let made: Vec<u32> = (first..).take(asked.len()).collect();
            keys! {
                pages: names("g", &grants), as: names("m", &made), at: number(WINDOW),
                alter: alter.collect::<Vec<_>>(),
                status: statuses.into_iter().map(i64::from).collect::<Vec<_>>(),
            }
        });
    }

    /// Writes down which grants are in use, and for what.
    pub(super) fn write_use(&self) {
        let grants = || {
            let frames = self.reference.frames.range(WINDOW..);
            frames.filter_map(|(_, shown)| Some((shown.grant?.0 as u32, shown.writable)))
        };
        let writing: BTreeSet<u32> =
            grants().filter(|(_, writable)| *writable).map(|(grant, _)| grant).collect();
        let all: BTreeSet<u32> = grants().map(|(grant, _)| grant).collect();
        let reading: BTreeSet<u32> = &all - &writing;
        if !all.is_empty() {
            self.sheet.step("check", 0, || {
                keys! { writing: names("g", &writing), reading: names("g", &reading) }
            });
        }
    }

    pub(super) fn write_move(&self, home: Home) {
        let name = |home| match home {
            Home::Nobody => None,
            Home::Front => Some("front"),
            Home::Back => Some("back"),
        };
        let device = "roamer";
        match (name(self.reference.home), name(home)) {
            (Some(from), Some(to)) if from != to => {
                let keys = || keys! { device: device, from: from, to: to };
                self.sheet.step("reattach", 0, keys);
            }
            (None, Some(to)) => self.sheet.step("attach", 0, || keys! { device: device, to: to }),
            (Some(from), None) => {
                self.sheet.step("detach", 0, || keys! { device: device, from: from });
            }
            (Some(_), Some(_)) | (None, None) => {}
        }
    }

    /// Writes down who tries to reach these frames, and what comes of it.
    pub(super) fn write_accesses(&self, gfns: &[u64]) {
        let Reference { frames, home, inside } = &self.reference;
        let mut by = vec!["cpu1", "dev0"];
        if *inside {
            by.push("cpu2");
        }
        if *home == Home::Back {
            by.push("roamer");
        } else if self.roams {
            self.sheet.step("access", 0, || {
                keys! { by: "roamer", at: numbers(gfns.iter().copied()), reaches: "fault" }
            });
        }
        for kind in ["read", "write"] {
            self.sheet.step("access", 0, || {
                let shown = |gfn| frames.get(gfn).filter(|shown| shown.writable || kind == "read");
                let reaches = |gfn| shown(gfn).map_or("fault".to_owned(), Shown::page);
                keys! {
                    by: by.clone(), at: numbers(gfns.iter().copied()), kind: kind,
                    reaches: gfns.iter().map(reaches).collect::<Vec<_>>(),
                }
            });
        }
    }
}

/// Flushes of each kind for so many pages.
pub(super) fn flushes(pages: usize) -> u64 {
    pages.div_ceil(32) as u64
}
