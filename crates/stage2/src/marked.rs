//! Single pages of tables whose walkers mark every entry before they cache it.
//!
//! With accessed and dirty flags enabled in the EPTP, a CPU sets the accessed flag of each
//! entry it uses, by a locked update of the entry as it read it, and keeps no translation
//! of an entry without the flag (Intel SDM volume 3C, "Accessed and Dirty Flags for EPT"
//! and "Guidelines for Use of the INVEPT Instruction": clearing the flag is among the
//! changes to invalidate for). The exchange that clears an entry returns what was there.
//! Without the flag in it, no walk had come as far as to cache the leaf; a walk that comes
//! later finds its locked update fail and the entry empty.

use flush::{Gfn, Gone, Skipped, Tlb};

use crate::entry::{Entry, Leaf, Level};
use crate::format::{Format, ept::Ept};
use crate::memory::TableMemory;
use crate::page::PageError;
use crate::tree::Tables;

/// As [`clear_page`](crate::clear_page) on tables that only CPUs walk, and all of them with
/// accessed flags enabled: a leaf without its flag goes on no record, for no CPU has it.
///
/// Nobody may have cleared the flag of the leaf, or written the same mapping anew without
/// it, unless that was flushed or the page is held until it is. A page mapped for a grant is
/// such a page: each of its mappings holds it by itself.
///
/// # Errors
///
/// See [`PageError`]; nothing was changed or recorded then.
pub fn clear_marked_page<'id, M: TableMemory>(
    tables: Tables<'_, Ept, M>,
    gfn: Gfn,
    skipped: &mut Skipped<'id>,
    mut expected: impl FnMut(&Leaf) -> bool,
) -> Result<(Leaf, Gone<'id, Tlb>), PageError> {
    let geometry = tables.format.geometry();
    if !geometry.contains(gfn) {
        return Err(PageError::OutOfRange);
    }
    let (slot, raw) = tables.find(gfn, Level::PAGE);
    let leaf = match tables.format.decode(slot.level, raw) {
        Entry::Leaf(leaf) if slot.level == Level::PAGE => leaf,
        Entry::Leaf(_) => return Err(PageError::Large(slot.level)),
        Entry::Empty | Entry::Inert | Entry::Table(_) => return Err(PageError::Absent),
    };
    let leaf = tables.replace_leaf(slot, raw, leaf, |_, leaf| {
        if expected(leaf) { Ok(0) } else { Err(PageError::Unexpected(*leaf)) }
    })?;
    tables.memory.drop_live(slot.table);
    // What hardware may hold in its place, if it is part of a larger leaf from before, is
    // not in this entry's flag.
    let part = leaf.origin != Level::PAGE;
    let gone = if leaf.accessed || part {
        let order = tables.recorded_order(Level::PAGE, &leaf);
        skipped.leaf::<Tlb>(geometry.span(Level::PAGE, gfn), order)
    } else {
        skipped.absent::<Tlb>()
    };
    Ok((leaf, gone))
}
