//! Real memory: frames to allocate, and their words as atomics.
//!
//! Every frame handed out here is shared with whatever devices, page walkers and guests
//! it is shown to, so it is reached only as atomics, through [`words`] (64 bits) or
//! [`statuses`] (16 bits). One frame keeps one width for ever. Bytes that firmware left
//! are read through [`firmware`], and such memory is never allocated.

// UNSAFETY: physical memory becomes references here, and nowhere else.
#![expect(unsafe_code)]

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering, fence};

use flush::Mfn;
use testbed::address::{Extent, PhysicalAddress};
use testbed::boot_info::{BootInfo, BootInfoError};
use testbed::frames::{FrameMap, NotClaimed, OutOfFrames};
use testbed::physical::Physical;
use testbed::{multiboot2, pvh};

use crate::arch;

/// Managed memory ends here: the page tables map what follows uncached.
const LIMIT: u64 = 2 << 30;
/// Every managed frame has a number below this.
pub(crate) const FRAME_LIMIT: usize = (LIMIT / 4096) as usize;
/// Words of a map of the frames below [`LIMIT`].
const WORDS: usize = FRAME_LIMIT / 64;
/// The first MiB can be read, page zero included, from this address on.
const LOW_ALIAS: u64 = 4 << 30;
/// The first managed frame: what lies below 1 MiB belongs to firmware.
const FIRST: Mfn = Mfn::new(256);

/// The managed frames.
static FRAMES: FrameMap<WORDS> = FrameMap::new();
/// The frames that are reached as 16-bit words.
static NARROW: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// Set when memory has been handed to the allocator.
static MANAGED: AtomicBool = AtomicBool::new(false);

/// A frame as 64-bit words.
pub(crate) type Words = [AtomicU64; 512];
/// A frame as 16-bit words.
pub(crate) type Statuses = [AtomicU16; 2048];

/// The shape of the loader's information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parser {
    /// PVH start information.
    Pvh,
    /// Multiboot2 information.
    Multiboot2,
}

/// Why memory could not be put to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartError {
    /// The loader's information is unusable.
    BootInfo(BootInfoError),
    /// It was put to use already.
    Twice,
    /// No usable memory lies between 1 MiB and 2 GiB.
    NoMemory,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BootInfo(error) => error.fmt(f),
            Self::Twice => f.write_str("memory was put to use twice"),
            Self::NoMemory => f.write_str("no usable memory between 1 MiB and 2 GiB"),
        }
    }
}

impl core::error::Error for StartError {}

/// Read the loader's information and manage all memory it leaves free.
///
/// # Errors
/// [`StartError`] if the information is unusable, leaves no memory, or this is not the
/// first call.
pub(crate) fn initialise(
    parser: Parser,
    information: PhysicalAddress,
) -> Result<BootInfo<'static>, StartError> {
    if MANAGED.swap(true, Ordering::SeqCst) {
        return Err(StartError::Twice);
    }
    let info = match parser {
        Parser::Pvh => pvh::parse(&Firmware, information),
        Parser::Multiboot2 => multiboot2::parse(&Firmware, information),
    };
    let info = info.map_err(StartError::BootInfo)?;
    let usable = info.regions.iter().filter(|region| region.usable);
    for (first, last) in usable.filter_map(|region| region.extent.frames_inside()) {
        if last >= FIRST {
            FRAMES.add(first.max(FIRST), last);
        }
    }
    // Regions may overlap: what the map also calls unusable, or what the loader's
    // information occupies, goes even if another line offers it.
    let reserved = info.regions.iter().filter(|region| !region.usable);
    let occupied = info.occupied.iter().copied();
    let kept = occupied.chain(reserved.map(|region| region.extent)).chain([arch::image()]);
    for (first, last) in kept.filter_map(Extent::frames_touched) {
        FRAMES.remove(first, last);
    }
    if FRAMES.free_frames() == 0 {
        return Err(StartError::NoMemory);
    }
    Ok(info)
}

/// Whether a frame is managed and not allocated.
pub(crate) fn is_free(frame: Mfn) -> bool {
    FRAMES.is_free(frame)
}

/// How many frames are free at the moment.
pub(crate) fn free_frames() -> u64 {
    FRAMES.free_frames()
}

/// Allocate one frame, filled with zeros.
///
/// # Errors
/// [`OutOfFrames`] if none is free.
pub(crate) fn allocate() -> Result<Mfn, OutOfFrames> {
    allocate_block(0)
}

/// Allocate `2^order` adjacent frames, the first a multiple of `2^order`, zeroed.
///
/// # Errors
/// [`OutOfFrames`] if no such block is free.
pub(crate) fn allocate_block(order: u8) -> Result<Mfn, OutOfFrames> {
    let first = FRAMES.claim(order)?;
    for offset in 0..1_u64 << order {
        for word in first
            .get()
            .checked_add(offset)
            .and_then(|frame| words(Mfn::new(frame)))
            .into_iter()
            .flatten()
        {
            word.store(0, Ordering::Relaxed);
        }
    }
    // The zeros come before whatever shows the frame to a device or another processor.
    fence(Ordering::SeqCst);
    Ok(first)
}

/// Allocate one frame that is reached as 16-bit words, for ever.
///
/// It cannot be released: a 64-bit view of it must never come to exist.
///
/// # Errors
/// [`OutOfFrames`] if none is free.
pub(crate) fn allocate_statuses() -> Result<Mfn, OutOfFrames> {
    let frame = allocate()?;
    if let Some((word, bit)) = narrow_bit(frame) {
        word.fetch_or(bit, Ordering::SeqCst);
    }
    Ok(frame)
}

/// Give one allocated frame back. Its words stay as they are until it is allocated again.
///
/// # Errors
/// [`NotClaimed`] if it is not an allocated frame, or one of [`allocate_statuses`].
pub(crate) fn release(frame: Mfn) -> Result<(), NotClaimed> {
    release_block(frame, 0)
}

/// Give an allocated block, or an aligned part of one, back.
///
/// # Errors
/// [`NotClaimed`] if any frame of it is not allocated, or one of [`allocate_statuses`].
pub(crate) fn release_block(first: Mfn, order: u8) -> Result<(), NotClaimed> {
    let refused = NotClaimed { first, order };
    let size = 1_u64.checked_shl(u32::from(order)).ok_or(refused)?;
    let last = size.checked_sub(1).and_then(|more| first.get().checked_add(more));
    if (first.get()..=last.ok_or(refused)?).any(|frame| words(Mfn::new(frame)).is_none()) {
        return Err(refused);
    }
    FRAMES.give_back(first, order)
}

/// The 64-bit words of a managed frame, allocated or free; `None` for any other frame.
pub(crate) fn words(frame: Mfn) -> Option<&'static Words> {
    if !FRAMES.is_managed(frame) || is_narrow(frame) {
        return None;
    }
    let address = usize::try_from(PhysicalAddress::of_frame(frame)?.get()).ok()?;
    // SAFETY: a managed frame is RAM from 1 MiB to 2 GiB, mapped writable at its own
    // address, page aligned, outside the image and all memory read as plain bytes, and is
    // so for ever. It is only ever reached as atomics, and since it is not narrow, as these.
    Some(unsafe { &*(address as *const Words) })
}

/// Write the cache line that holds `word` back to memory.
///
/// For readers that do not look into the processor's caches. What was stored before is in
/// memory when this returns.
pub(crate) fn write_back(word: &AtomicU64) {
    // SAFETY: every x86-64 processor has the instruction, and it changes no byte: the
    // line of a live reference goes to memory as it is.
    unsafe { core::arch::x86_64::_mm_clflush(core::ptr::from_ref(word).cast()) };
    fence(Ordering::SeqCst);
}

/// The 16-bit words of a frame of [`allocate_statuses`]; `None` for any other frame.
pub(crate) fn statuses(frame: Mfn) -> Option<&'static Statuses> {
    if !FRAMES.is_managed(frame) || !is_narrow(frame) {
        return None;
    }
    let address = usize::try_from(PhysicalAddress::of_frame(frame)?.get()).ok()?;
    // SAFETY: as in `words`; a narrow frame stays narrow, and `words` refuses it.
    Some(unsafe { &*(address as *const Statuses) })
}

/// Bytes that firmware or the loader left: tables, boot modules.
///
/// `None` if any of them lies in the image, in managed memory, or at or above 2 GiB.
pub(crate) fn firmware(address: PhysicalAddress, length: usize) -> Option<&'static [u8]> {
    Firmware.bytes(address, length)
}

/// Memory that firmware and the loader filled in before the image started.
pub(crate) struct Firmware;

impl Physical<'static> for Firmware {
    fn bytes(&self, address: PhysicalAddress, length: usize) -> Option<&'static [u8]> {
        let extent = Extent { start: address, length: u64::try_from(length).ok()? };
        if length == 0 {
            return Some(&[]);
        }
        let (first, last) = extent.frames_touched()?;
        let (image_first, image_last) = arch::image().frames_touched()?;
        let in_image = first <= image_last && last >= image_first;
        let mut frames = (first.get()..=last.get()).map(Mfn::new);
        if last.get() >= LIMIT / 4096 || in_image || frames.any(|frame| FRAMES.is_managed(frame)) {
            return None;
        }
        // Nothing that straddles 1 MiB comes here: the image starts there.
        let start = if last < FIRST { address.checked_add(LOW_ALIAS)? } else { address };
        let start = usize::try_from(start.get()).ok()?;
        // SAFETY: the bytes are mapped, by the alias or at their own address, and nothing
        // writes them: they are outside the image, and outside managed memory. What is
        // read before memory is managed is listed as occupied by the parsers or discarded
        // with the error that ends the boot, and `initialise` keeps it from being managed
        // later.
        Some(unsafe { core::slice::from_raw_parts(start as *const u8, length) })
    }
}

fn is_narrow(frame: Mfn) -> bool {
    narrow_bit(frame).is_some_and(|(word, bit)| word.load(Ordering::SeqCst) & bit != 0)
}

fn narrow_bit(frame: Mfn) -> Option<(&'static AtomicU64, u64)> {
    let index = usize::try_from(frame.get() / 64).ok()?;
    Some((NARROW.get(index)?, 1 << (frame.get() % 64)))
}
