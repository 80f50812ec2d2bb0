//! The books of a world: where every frame, reference and table page is.
//!
//! [`Books`] are drawn up from the tables that hardware walks, entry by entry, and compared
//! with what the machine, the counts of references and the allocator of tables say. What
//! is left over is held by somebody, or lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
};

use flush::Mfn;
use gnttab::{GrantStorage, Version};
use hwmodel::{Frame, UnitId};
use stage2::{
    Entry, Format, Level,
    format::{
        ept::{Ept, EptLevels},
        npt::{Npt, NptLevels},
    },
};

use crate::{CpuTables, Guest, Ram, World, world::ModelRam};

/// What the tables of a world do not explain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// Frames in use for which nothing accounts: held table pages, queues of units, lost ones.
    pub strays: BTreeSet<u64>,
    /// References on pages for which no entry stands: those of held pages, or lost ones.
    pub references: u64,
    /// What must not be in any case, in words.
    pub wrong: Vec<String>,
    /// Tables whose granters see other grants in use than are pinned. A guest that writes
    /// into its own entries can bring that about.
    pub unlike: Vec<String>,
}

/// One tree of tables, as hardware would find it.
#[derive(Default)]
struct Tree {
    tables: BTreeSet<u64>,
    /// What each frame number shows.
    pages: BTreeMap<u64, u64>,
}

impl Tree {
    /// Adds what lies below `table`, which serves the frames from `first` on.
    fn add(
        &mut self,
        world: &World,
        format: &impl Format,
        (table, level): (u64, Level),
        first: u64,
        wrong: &mut Vec<String>,
    ) {
        if !self.tables.insert(table) {
            wrong.push(format!("two entries lead to the table {table:#x}"));
            return;
        }
        let mut bytes = [0; 4096];
        world.machine.read_bytes(table << 12, &mut bytes);
        for (index, word) in (0..).zip(bytes.as_chunks().0) {
            let raw = u64::from_le_bytes(*word);
            let span = 1 << (9 * u32::from(level.get()));
            let at = first + index * span;
            if raw == 0 {
                continue;
            }
            match format.decode(level, raw) {
                Entry::Table(next) => {
                    let Some(below) = level.below() else { continue };
                    self.add(world, format, (next.get(), below), at, wrong);
                }
                Entry::Leaf(leaf) => {
                    self.pages.extend((0..span).map(|page| (at + page, leaf.mfn.get() + page)));
                }
                Entry::Empty | Entry::Inert => {}
            }
        }
    }
}

impl World {
    /// Draws up the books. No call may be under way.
    #[must_use]
    pub fn books(&self) -> Books {
        let mut books = Books::default();
        let mut tables = self.tables_of_units();
        let mut used = BTreeSet::new();
        let mut shown = vec![0_u32; self.hypervisor.memory.ram().frames() as usize];
        for guest in &self.hypervisor.guests {
            let tree = self.trees(guest, &mut tables, &mut books.wrong);
            for mfn in tree.pages.values() {
                match usize::try_from(*mfn).ok().and_then(|frame| shown.get_mut(frame)) {
                    Some(count) => *count += 1,
                    None => books.wrong.push(format!("an entry shows {mfn:#x}, beyond memory")),
                }
            }
            used.extend(guest.grants().storage().frames().map(Mfn::get));
            check_use(guest, &mut books.unlike);
        }
        used.extend(&tables);
        for (frame, shown) in (0..).zip(shown) {
            let references = self.hypervisor.pages.get(Mfn::new(frame)).0;
            if references < shown {
                let text = format!("{references} references on {frame:#x}, and {shown} entries");
                books.wrong.push(text);
            }
            books.references += u64::from(references.saturating_sub(shown));
            if references > 0 {
                used.insert(frame);
            }
        }
        let in_use = self.machine.frames_in_use().into_iter().map(|Frame(frame)| frame).collect();
        let free = used.difference(&in_use).map(|frame| format!("{frame:#x} is free, and used"));
        books.wrong.extend(free);
        books.strays = in_use.difference(&used).copied().collect();
        books
    }

    /// The trees of one guest, which must agree; what its CPUs see.
    fn trees(
        &self,
        guest: &Guest<ModelRam>,
        tables: &mut BTreeSet<u64>,
        wrong: &mut Vec<String>,
    ) -> Tree {
        let mut cpu = Tree::default();
        let root = guest.cpu_root().get();
        match guest.cpu_tables() {
            CpuTables::Ept | CpuTables::MarkedEpt => {
                let format = Ept::new(EptLevels::Four);
                cpu.add(self, &format, (root, format.geometry().top()), 0, wrong);
            }
            CpuTables::Npt => {
                let format = Npt::new(NptLevels::Four);
                cpu.add(self, &format, (root, format.geometry().top()), 0, wrong);
            }
        }
        tables.extend(&cpu.tables);
        if guest.dma.root() != guest.cpu_root() {
            let mut device = Tree::default();
            let format = guest.dma.format();
            let root = (guest.dma.root().get(), format.geometry().top());
            device.add(self, format, root, 0, wrong);
            tables.extend(&device.tables);
            let differs = |(gfn, mfn): &(&u64, &u64)| device.pages.get(gfn) != Some(mfn);
            let first = cpu
                .pages
                .iter()
                .find(differs)
                .or_else(|| device.pages.iter().find(|(gfn, _)| !cpu.pages.contains_key(gfn)));
            if let Some((gfn, mfn)) = first {
                let id = guest.id();
                wrong.push(format!("{id:?} at {gfn:#x}: {mfn:#x} in one tree, not in the other"));
            }
        }
        cpu
    }

    /// The root table of each unit, and its context tables.
    fn tables_of_units(&self) -> BTreeSet<u64> {
        const ROOT_TABLE: u64 = 0x20;
        let mut tables = BTreeSet::new();
        for unit in 0..self.units.len() {
            let root = self.machine.register_read64(UnitId(unit), ROOT_TABLE) >> 12;
            tables.insert(root);
            for bus in 0..256 {
                let entry = self.machine.peek64((root << 12) + 16 * bus).unwrap_or(0);
                if entry & 1 != 0 {
                    tables.insert(entry >> 12);
                }
            }
        }
        tables
    }
}

/// What a granter sees in use is what is pinned.
fn check_use(guest: &Guest<ModelRam>, unlike: &mut Vec<String>) {
    const IN_USE: u64 = 0b1_1000;
    let table = guest.grants();
    let storage = table.storage();
    let in_use = match table.version() {
        Version::V1 => (0..table.frames())
            .filter_map(|page| storage.shared(page))
            .flatten()
            .filter(|word| word.load(Ordering::SeqCst) & IN_USE != 0)
            .count(),
        Version::V2 => (0..table.status_frames())
            .filter_map(|page| storage.status(page))
            .flatten()
            .filter(|word| u64::from(word.load(Ordering::SeqCst)) & IN_USE != 0)
            .count(),
    };
    let pinned = table.pinned();
    if in_use != pinned {
        let id = guest.id();
        unlike.push(format!("{pinned} grants of {id:?} are pinned, {in_use} are seen in use"));
    }
}
