//! The first instructions of further processors.
//!
//! A [`Trampoline`] is a page below 1 MiB that holds them. It is lent to one processor at
//! a time: the next is started when the one before has taken its stack.

// UNSAFETY: copies code to a fixed page, and hands a stack over in a static word.
#![expect(unsafe_code)]

use core::fmt;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use spin::Once;
use testbed::address::Extent;
use testbed::boot_info::BootInfo;

use super::{PROCESSORS, segments, traps};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes of one further processor's stack, with its guard page, as the linker script and
/// the page tables in `boot.s` have them.
const STACK: u64 = 33 * PAGE;

/// What a further processor does, for ever, when it has its stack and its segments.
pub(crate) type Entry = fn(usize) -> !;

static ENTRY: Once<Entry> = Once::new();

/// No page below 640 KiB is free for the first instructions of a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoPlace;

impl fmt::Display for NoPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no page below 640 KiB is free for the start of further processors")
    }
}

impl core::error::Error for NoPlace {}

/// A page below 1 MiB with the first instructions of a processor.
pub(crate) struct Trampoline {
    page: u8,
}

impl Trampoline {
    /// Put the instructions into a page that is memory and that nobody uses.
    ///
    /// # Errors
    /// [`NoPlace`] if there is none.
    pub(crate) fn place(boot: &BootInfo<'_>, entry: Entry) -> Result<Self, NoPlace> {
        ENTRY.call_once(|| entry);
        let is_free = |page: &u8| {
            let (first, last) = (u64::from(*page) * PAGE, u64::from(*page) * PAGE + PAGE - 1);
            let meets = |extent: &Extent| {
                let (start, length) = (extent.start.get(), extent.length);
                length > 0 && start <= last && start.saturating_add(length) > first
            };
            let holds = |extent: &Extent| {
                let (start, length) = (extent.start.get(), extent.length);
                start <= first && start.saturating_add(length) > last
            };
            boot.regions.iter().any(|region| region.usable && holds(&region.extent))
                && !boot.regions.iter().any(|region| !region.usable && meets(&region.extent))
                && !boot.occupied.iter().any(meets)
        };
        let page = (1..0xa0).find(is_free).ok_or(NoPlace)?;
        let start = ptr::addr_of!(trampoline_start);
        let length = ptr::addr_of!(trampoline_end).addr().saturating_sub(start.addr());
        let target = (usize::from(page) << 12) as *mut u8;
        // SAFETY: the code lies between the two symbols and fits into a page. The page is
        // mapped writable at its own address and is memory; it lies below 1 MiB, so it is
        // neither managed nor part of the image, and it is not among what the loader left.
        unsafe { ptr::copy_nonoverlapping(start, target, length) };
        Ok(Self { page })
    }

    /// The number of the page: the vector of a start-up IPI.
    pub(crate) const fn page(&self) -> u8 {
        self.page
    }

    /// The next processor that starts is to be the one with this number.
    ///
    /// `false`, with nothing changed, for the boot processor and those without a stack.
    pub(crate) fn lend(&self, number: usize) -> bool {
        if !(1..PROCESSORS).contains(&number) {
            return false;
        }
        let top = ptr::addr_of!(stack_top).addr() as u64 + STACK * number as u64;
        further_stack.store(top, Ordering::SeqCst);
        further_number.store(number as u64, Ordering::SeqCst);
        true
    }
}

/// Where the assembly goes on, on the stack of processor `number`.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
extern "C" fn rust_further_entry(number: usize) -> ! {
    segments::load(number);
    traps::load();
    match ENTRY.get() {
        Some(entry) => entry(number),
        None => super::stop(),
    }
}

// SAFETY: the linker script and `boot.s` define them. Of the first three only the
// addresses are used; the last two are words that only the boot processor writes.
unsafe extern "C" {
    safe static stack_top: u8;
    safe static trampoline_start: u8;
    safe static trampoline_end: u8;
    safe static further_stack: AtomicU64;
    safe static further_number: AtomicU64;
}
