//! Accesses of processors and devices, and where they end.
//!
//! A write shows in memory: every page that ever had a name is filled with poison before.
//! For a read each of them is marked, and what was read is the mark.

use core::fmt;
use core::sync::atomic::Ordering;

use flush::{Gfn, Mfn};
use testbed::ensure;
use testbed::failure::{Context, Failure};
use testbed::scenario::{ANY, DEVICES, NONE};

use super::{Played, name, seat_number};
use crate::embedding::PageInfo;
use crate::guest::{Access, Reached};
use crate::{memory, poison};

/// Where a processor writes, in bytes from the start of a page.
const WRITTEN_AT: u64 = 0x7e8;
/// The upper half of what it writes.
const WRITTEN: u64 = 0x7763 << 48;
/// Milliseconds between the marks of two pages: a controller's clock goes on.
const MARK: u64 = 1 << 24;

/// What an access is expected to come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// This frame, of the page with this number.
    Frame(Mfn, u64),
    /// Nothing.
    Fault,
    /// Anything that has not been freed.
    Any,
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame(_, page) => write!(f, "page {page}"),
            Self::Fault => f.write_str("a fault"),
            Self::Any => f.write_str("no free page"),
        }
    }
}

impl Played<'_> {
    /// Line `reaches`: who, where, what (a page, nothing, or anything), and whether to write.
    pub(super) fn access(&mut self, values: [u64; 4]) -> Result<(), Failure> {
        let [who, gfn, page, write] = values;
        let gfn = Gfn::new(gfn);
        let wanted = match page {
            NONE => Wanted::Fault,
            ANY => Wanted::Any,
            page => Wanted::Frame(self.page(page)?.at(gfn), page),
        };
        if write == 0 { self.read(who, gfn, wanted) } else { self.write(who, gfn, wanted) }
    }

    fn write(&mut self, who: u64, gfn: Gfn, wanted: Wanted) -> Result<(), Failure> {
        for known in self.books.pages.iter().flatten() {
            if is_watched(known.at(gfn)) {
                poison::fill(known.at(gfn))?;
            }
        }
        // What was recorded before is no concern of this access.
        self.world.faults();
        let mut arrived = None;
        if who < DEVICES {
            self.unique += 1;
            let access = Access::Write(WRITTEN | self.unique);
            let reached = self.seats[seat_number(who)?].access(gfn, WRITTEN_AT, access)?;
            arrived = Some(reached != Reached::Nothing);
        } else {
            let device = self.device_number(who)?;
            self.device_writes(device, gfn)?;
        }
        self.world.faults();
        let mut found = false;
        for (number, known) in self.books.pages.iter().enumerate() {
            let Some(known) = known else { continue };
            let frame = known.at(gfn);
            if !is_watched(frame) {
                continue;
            }
            let words = memory::words(frame).context("words of a frame")?;
            let written = words.iter().filter(|word| !poison::is_left(word)).count();
            if written == 0 {
                continue;
            }
            let whole = match who {
                DEVICES => words.len(),
                _ => 1,
            };
            ensure!(written == whole, "{written} words of page {number} were written");
            found = true;
            let right = match wanted {
                Wanted::Frame(wanted, _) => frame == wanted,
                Wanted::Fault => false,
                Wanted::Any => is_in_use(frame),
            };
            let who = Who(who);
            ensure!(right, "{who} at {gfn:?} wrote to page {number}; {wanted} was expected");
        }
        let who = Who(who);
        match wanted {
            Wanted::Frame(..) => {
                ensure!(found, "{who} at {gfn:?} wrote to no page; {wanted} was expected")
            }
            Wanted::Fault => ensure!(arrived != Some(true), "{who} at {gfn:?} wrote to some page"),
            Wanted::Any => {}
        }
        Ok(())
    }

    /// Writes to each of the pages that were named, and looks at all of them afterwards: each
    /// has what was meant for it.
    pub(super) fn touch(&mut self, who: u64) -> Result<(), Failure> {
        let used = core::mem::take(&mut self.books.used);
        for (gfn, page) in &used {
            poison::fill(self.page(*page as u64)?.at(*gfn))?;
        }
        for (number, (gfn, _)) in (1..).zip(&used) {
            if who < DEVICES {
                let access = Access::Write(WRITTEN | number);
                self.seats[seat_number(who)?].access(*gfn, WRITTEN_AT, access)?;
            } else {
                let device = self.device_number(who)?;
                self.device_writes(device, *gfn)?;
            }
        }
        for (number, (gfn, page)) in (1..).zip(&used) {
            let words = memory::words(self.page(*page as u64)?.at(*gfn)).context("a frame")?;
            let written = words.iter().filter(|word| !poison::is_left(word)).count();
            let right = match who {
                DEVICES => written == words.len(),
                _ if who > DEVICES => written == 1,
                _ => {
                    let word = words[WRITTEN_AT as usize / 8].load(Ordering::SeqCst);
                    written == 1 && word == WRITTEN | number
                }
            };
            let who = Who(who);
            ensure!(right, "{who} at {gfn:?} wrote {written} words of page {page}");
        }
        Ok(())
    }

    fn read(&mut self, who: u64, gfn: Gfn, wanted: Wanted) -> Result<(), Failure> {
        for (number, known) in (1..).zip(self.books.pages.iter().flatten()) {
            if is_watched(known.at(gfn)) {
                let words = memory::words(known.at(gfn)).context("words of a frame")?;
                words[0].store(number * MARK, Ordering::SeqCst);
            }
        }
        self.world.faults();
        let found = if who < DEVICES {
            match self.seats[seat_number(who)?].access(gfn, 0, Access::Read)? {
                Reached::Memory(word) => Some(word),
                Reached::Nothing => None,
            }
        } else {
            ensure!(who == DEVICES, "{} shows nothing of what it reads", Who(who));
            let owner = self.owners[0].context("a domain that has the device")?;
            self.world.read_page(gfn)?;
            let (faults, _) = self.world.faults();
            let owner = self.world.guest(owner)?;
            if faults.is_empty() { Some(self.world.timestamp(owner)?) } else { None }
        };
        let read = found.and_then(|word| {
            let place = usize::try_from((word / MARK).checked_sub(1)?).ok()?;
            let known = self.books.pages.iter().enumerate();
            let (number, page) =
                known.filter_map(|(number, page)| Some((number, page.as_ref()?))).nth(place)?;
            Some((number, page.at(gfn)))
        });
        let right = match wanted {
            Wanted::Frame(wanted, _) => read.is_some_and(|(_, frame)| frame == wanted),
            Wanted::Fault => found.is_none(),
            Wanted::Any => read.is_none_or(|(_, frame)| is_in_use(frame)),
        };
        let who = Who(who);
        match read {
            Some((page, _)) => {
                ensure!(right, "{who} at {gfn:?} read page {page}; {wanted} was expected");
            }
            None => ensure!(right, "{who} at {gfn:?} read {found:x?}; {wanted} was expected"),
        }
        Ok(())
    }

    /// Whether the page with this name is somebody's.
    pub(super) fn is_kept(&self, page: u64) -> Result<bool, Failure> {
        Ok(is_in_use(self.page(page)?.frame))
    }

    /// How often the page with this name is counted.
    pub(super) fn references(&self, page: u64) -> Result<u64, Failure> {
        let info = PageInfo::of(self.page(page)?.frame).context("books of a frame")?;
        Ok(info.counts().0.into())
    }

    /// Whether the mapping with this name is in the tables, and whether its grant is in use.
    pub(super) fn shown(&self, mapping: u64) -> Result<(bool, bool), Failure> {
        let mapped = self.mapping(mapping)?;
        let page = self.page(name(mapping).map(|_| mapped.page as u64)?)?;
        let found = self.world.guest(mapped.by)?.lookup(mapped.gfn);
        let (granter, reference) = mapped.grant;
        let in_use = self.world.bits(granter, reference)?.0;
        Ok((found.is_some_and(|found| found.mfn == page.frame), in_use))
    }
}

/// Whether a frame is some page's, or free. A page that was freed may be a table by now,
/// which is nobody's to write to.
fn is_watched(frame: Mfn) -> bool {
    is_in_use(frame) || memory::is_free(frame)
}

/// Whether a frame is counted by anybody.
fn is_in_use(frame: Mfn) -> bool {
    PageInfo::of(frame).is_some_and(|info| info.counts().0 > 0)
}

/// Who accesses memory, in words.
struct Who(u64);

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.checked_sub(DEVICES) {
            Some(device) => write!(f, "device {device}"),
            None => write!(f, "processor {}", self.0),
        }
    }
}
