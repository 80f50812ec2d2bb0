//! Pages of the hypervisor's own in a guest's space.
//!
//! Such a page takes the place of whatever memory the guest had there, and is itself
//! counted: the guest may hide it again, or put something else in its place.

use core::fmt;

use flush::{Batch, Gfn, Mfn, Released};
use p2m::PageKind;

use super::guest::{NotMapped, untouched};
use super::page_info::PageInfo;
use super::{Guest, Hypervisor};
use crate::memory;

/// A page was not put into a guest's space, or not taken out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageNotMoved {
    /// There is no memory of the guest's own at the number.
    NotMemory,
    /// Something is there that does not give way, or there is no memory for a table.
    NoRoom,
    /// A flush failed: the pages concerned stay counted.
    Flush,
}

impl fmt::Display for PageNotMoved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotMemory => "there is no memory of the guest's own",
            Self::NoRoom => "something else is there, or memory is short",
            Self::Flush => "a flush failed",
        })
    }
}

impl core::error::Error for PageNotMoved {}

impl Hypervisor {
    /// Show `guest` a page at `gfn`, in place of the memory that may be there.
    ///
    /// # Errors
    /// [`PageNotMoved`]; then the guest does not have the page.
    pub(crate) fn show(&self, guest: &Guest, gfn: Gfn, page: Mfn) -> Result<(), PageNotMoved> {
        let info = PageInfo::of(page).ok_or(PageNotMoved::NoRoom)?;
        info.take(false).map_err(|_| PageNotMoved::NoRoom)?;
        let mut shown = true;
        // What has to wait for the flush: the memory that was there, or the page itself if
        // it was taken out again.
        let mut batch: Batch<Option<Mfn>, 1> = Batch::new(guest.id());
        let held = batch.hold(|skipped| {
            Ok::<_, core::convert::Infallible>(
                match guest.map(gfn, 0, page, PageKind::RamReadWrite, skipped) {
                    Ok(Some((was, cleared))) => (Some(was), cleared),
                    Ok(None) => (None, untouched(skipped)),
                    Err(NotMapped { cleared }) => {
                        shown = false;
                        (Some(page), cleared)
                    }
                },
            )
        });
        held.map_err(|_| PageNotMoved::NoRoom)?;
        let flushed = self.flush(guest, &mut batch).map_err(|_| PageNotMoved::Flush)?;
        if let Some(was) = flushed {
            give_up(&was);
        }
        if shown { Ok(()) } else { Err(PageNotMoved::NoRoom) }
    }

    /// Take the single page of memory at `gfn` from `guest`.
    ///
    /// # Errors
    /// [`PageNotMoved`]; the guest may still have it.
    pub(crate) fn hide(&self, guest: &Guest, gfn: Gfn) -> Result<(), PageNotMoved> {
        let mapping = guest.lookup(gfn).ok_or(PageNotMoved::NotMemory)?;
        let expected = p2m::Expected { mfn: mapping.mfn, kind: PageKind::RamReadWrite };
        let mut batch: Batch<Option<Mfn>, 1> = Batch::new(guest.id());
        let held = batch.hold(|skipped| {
            guest.clear(gfn, expected, skipped).map(|cleared| (Some(mapping.mfn), cleared))
        });
        held.map_err(|_| PageNotMoved::NotMemory)?;
        let flushed = self.flush(guest, &mut batch).map_err(|_| PageNotMoved::Flush)?;
        if let Some(was) = flushed {
            give_up(&was);
        }
        Ok(())
    }
}

/// Drop the reference that a place in a guest's space held.
fn give_up(page: &Released<Option<Mfn>>) {
    let Some(frame) = *page.get() else { return };
    if PageInfo::of(frame).is_some_and(|info| info.drop_one(false)) {
        // The allocator refuses what is not its own; such a frame goes nowhere.
        memory::release(frame).ok();
    }
}
