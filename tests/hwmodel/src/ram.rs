//! Memory: frames with owners and generations, and old words not yet overwritten
//!
//! A frame is free, owned or held. [`crate::Machine::release`] ends a generation: the frame is filled with
//! [`POISON`] and every translation made before that moment is stale. The host (the hypervisor) reads and writes
//! RAM directly, not through the caches that the model judges.

use crate::failure::Misuse;
use crate::types::{Frame, Op, Owner, Space};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What a released frame is filled with. Not present in every table format.
pub const POISON: u64 = 0xdead_f00d_dead_f000;

/// Words of 8 bytes in a frame.
pub(crate) const WORDS: usize = 512;

/// A frame's words as the host can hold them outside the machine.
pub(crate) type Words = Arc<[AtomicU64; WORDS]>;

/// Who may use a frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FrameState {
    /// Nobody: any access is wrong.
    Free,
    /// Its owner.
    Owned,
    /// Given up by its owner, kept back until a flush has completed: accesses are still allowed.
    Held,
}

/// What is known about a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameInfo {
    /// Its owner; the last one if it is free.
    pub owner: Owner,
    /// Free, owned or held.
    pub state: FrameState,
    /// How many times it was released or re-owned.
    pub generation: u64,
    /// When it was last released or given to another owner; `Op(0)` if it never was.
    pub given_away: Op,
}

/// The end of one use of a frame.
struct Revoked {
    space: Space,
    /// One input page, or all of the space.
    page: Option<u64>,
    op: Op,
}

struct Slot {
    info: FrameInfo,
    /// Where and when somebody's use of the frame was ended.
    revoked: Vec<Revoked>,
    /// Made when first looked at: most frames of a test never are.
    words: OnceLock<Words>,
}

/// Through whose eyes memory is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum View {
    /// The processors', and everything coherent with them.
    Coherent,
    /// A unit's table walker: sees old words where they have not got through yet.
    Unit {
        /// It does not snoop the processors' caches.
        non_coherent: bool,
        /// Host writes wait in a write buffer.
        buffered: bool,
    },
}

pub(crate) struct Ram {
    slots: Vec<Slot>,
    free: Vec<Frame>,
    /// When the host last wrote a word, by byte address.
    changed: HashMap<u64, Op>,
    /// Old words behind dirty cache lines, by byte address.
    unwritten: HashMap<u64, u64>,
    /// Old words behind the write buffer, by byte address.
    buffered: HashMap<u64, u64>,
    pub(crate) track_lines: bool,
    pub(crate) track_buffer: bool,
}

fn new_words() -> Words {
    Arc::new(std::array::from_fn(|_| AtomicU64::new(0)))
}

impl Slot {
    fn words(&self) -> &Words {
        self.words.get_or_init(new_words)
    }
}

impl Ram {
    /// `frames` frames, all free; frame 0 is never handed out.
    pub(crate) fn new(frames: u64) -> Self {
        let slots = (0..frames)
            .map(|_| Slot {
                info: FrameInfo {
                    owner: Owner(0),
                    state: FrameState::Free,
                    generation: 0,
                    given_away: Op(0),
                },
                revoked: Vec::new(),
                words: OnceLock::new(),
            })
            .collect();
        Self {
            slots,
            // The last one released is the first one reused: the worst order for a stale translation.
            free: (1..frames).rev().map(Frame).collect(),
            changed: HashMap::new(),
            unwritten: HashMap::new(),
            buffered: HashMap::new(),
            track_lines: false,
            track_buffer: false,
        }
    }

    fn slot(&self, frame: Frame) -> Option<&Slot> {
        self.slots.get(usize::try_from(frame.0).ok()?)
    }

    fn slot_mut(&mut self, frame: Frame) -> Option<&mut Slot> {
        self.slots.get_mut(usize::try_from(frame.0).ok()?)
    }

    pub(crate) fn info(&self, frame: Frame) -> Option<FrameInfo> {
        self.slot(frame).map(|slot| slot.info)
    }

    pub(crate) fn words(&self, frame: Frame) -> Option<Words> {
        self.slot(frame).map(|slot| Arc::clone(slot.words()))
    }

    pub(crate) fn in_use(&self) -> impl Iterator<Item = Frame> + '_ {
        let frames = (0..).map(Frame).zip(&self.slots);
        frames.filter(|(_, slot)| slot.info.state != FrameState::Free).map(|(frame, _)| frame)
    }

    pub(crate) fn is_free(&self, frame: Frame) -> bool {
        self.info(frame).is_some_and(|info| info.state == FrameState::Free)
    }

    pub(crate) fn is_held(&self, frame: Frame) -> bool {
        self.info(frame).is_some_and(|info| info.state == FrameState::Held)
    }

    /// When `frame` was given away as far as input page `page` of `space` is concerned, if that was after `basis`.
    pub(crate) fn given_away(
        &self,
        frame: Frame,
        space: Option<Space>,
        page: u64,
        basis: Op,
    ) -> Option<Op> {
        let slot = self.slot(frame)?;
        let revoked = slot
            .revoked
            .iter()
            .filter(|revoked| {
                Some(revoked.space) == space && revoked.page.is_none_or(|of| of == page)
            })
            .map(|revoked| revoked.op);
        revoked.chain([slot.info.given_away]).filter(|op| *op > basis).max()
    }

    pub(crate) fn allocate(&mut self, owner: Owner) -> Option<Frame> {
        let frame = self.free.pop()?;
        self.take(frame, owner);
        Some(frame)
    }

    /// 2^order frames at a multiple of 2^order.
    pub(crate) fn allocate_block(&mut self, owner: Owner, order: u8) -> Option<Frame> {
        let pages = 1_u64.checked_shl(u32::from(order))?;
        let total = self.slots.len() as u64;
        let mut first = pages;
        while first.checked_add(pages)? <= total {
            if (first..first.saturating_add(pages)).all(|frame| self.is_free(Frame(frame))) {
                let block = first..first.saturating_add(pages);
                self.free.retain(|frame| !block.contains(&frame.0));
                for frame in block {
                    self.take(Frame(frame), owner);
                }
                return Some(Frame(first));
            }
            first = first.checked_add(pages)?;
        }
        None
    }

    fn take(&mut self, frame: Frame, owner: Owner) {
        if let Some(slot) = self.slot_mut(frame) {
            slot.info.owner = owner;
            slot.info.state = FrameState::Owned;
        }
    }

    pub(crate) fn hold(&mut self, frame: Frame) -> Result<(), Misuse> {
        match self.slot_mut(frame) {
            Some(slot) if slot.info.state != FrameState::Free => {
                slot.info.state = FrameState::Held;
                Ok(())
            }
            _ => Err(Misuse::NotOwned(frame)),
        }
    }

    pub(crate) fn release(&mut self, frame: Frame, op: Op) -> Result<(), Misuse> {
        self.end_generation(frame, FrameState::Free, None, op)?;
        for word in self.slot(frame).iter().flat_map(|slot| slot.words().iter()) {
            word.store(POISON, Ordering::SeqCst);
        }
        self.free.push(frame);
        Ok(())
    }

    pub(crate) fn give(&mut self, frame: Frame, owner: Owner, op: Op) -> Result<(), Misuse> {
        self.end_generation(frame, FrameState::Owned, Some(owner), op)
    }

    fn end_generation(
        &mut self,
        frame: Frame,
        state: FrameState,
        owner: Option<Owner>,
        op: Op,
    ) -> Result<(), Misuse> {
        match self.slot_mut(frame) {
            Some(slot) if slot.info.state != FrameState::Free => {
                slot.info.state = state;
                slot.info.owner = owner.unwrap_or(slot.info.owner);
                slot.info.generation = slot.info.generation.saturating_add(1);
                slot.info.given_away = op;
                slot.revoked.clear();
                Ok(())
            }
            _ => Err(Misuse::NotOwned(frame)),
        }
    }

    pub(crate) fn revoke(
        &mut self,
        frame: Frame,
        space: Space,
        page: Option<u64>,
        op: Op,
    ) -> Result<(), Misuse> {
        let Some(slot) = self.slot_mut(frame) else {
            return Err(Misuse::NotOwned(frame));
        };
        let same = |of: &&mut Revoked| of.space == space && of.page == page;
        match slot.revoked.iter_mut().find(same) {
            Some(revoked) => revoked.op = op,
            None => slot.revoked.push(Revoked { space, page, op }),
        }
        Ok(())
    }

    fn word(&self, address: u64) -> Option<&AtomicU64> {
        let slot = self.slot(Frame::containing(address))?;
        slot.words().get(((address & 0xfff) >> 3) as usize)
    }

    /// The word at `address` (rounded down to 8) as `view` sees it; `None` outside RAM.
    pub(crate) fn read(&self, address: u64, view: View) -> Option<u64> {
        let address = address & !7;
        let current = self.word(address)?.load(Ordering::SeqCst);
        let View::Unit { non_coherent, buffered } = view else {
            return Some(current);
        };
        let old_in_buffer = buffered.then(|| self.buffered.get(&address).copied()).flatten();
        let old_behind_line = non_coherent.then(|| self.unwritten.get(&address).copied()).flatten();
        Some(old_in_buffer.or(old_behind_line).unwrap_or(current))
    }

    /// Fills a frame with zeros, with nothing left behind in a cache or buffer.
    pub(crate) fn zero(&mut self, frame: Frame) {
        // One that nobody ever used is zero as it is.
        if self.slot(frame).is_some_and(|slot| slot.words.get().is_some()) {
            for word in 0..512 {
                self.hardware_store(frame.address().saturating_add(8 * word), 0);
            }
        }
    }

    /// Stores for hardware: coherent, nothing left behind in a cache or buffer.
    pub(crate) fn hardware_store(&mut self, address: u64, value: u64) {
        let address = address & !7;
        if let Some(word) = self.word(address) {
            word.store(value, Ordering::SeqCst);
        }
        // Mostly there is nothing, and looking for it would be what a new world costs.
        for behind in [&mut self.unwritten, &mut self.buffered] {
            if !behind.is_empty() {
                behind.remove(&address);
            }
        }
    }

    /// Sets bits for hardware (accessed, dirty).
    pub(crate) fn hardware_or(&self, address: u64, bits: u64) {
        if let Some(word) = self.word(address) {
            word.fetch_or(bits, Ordering::SeqCst);
        }
    }

    /// Stores for the host and gives the old word; `None` outside RAM.
    pub(crate) fn host_store(&mut self, address: u64, value: u64, op: Op) -> Option<u64> {
        let old = self.word(address)?.swap(value, Ordering::SeqCst);
        self.note_change(address, old, value, op);
        Some(old)
    }

    /// Compare-exchange for the host: the old word, and whether it was replaced; `None` outside RAM.
    pub(crate) fn host_compare_exchange(
        &mut self,
        address: u64,
        expected: u64,
        value: u64,
        op: Op,
    ) -> Option<Result<u64, u64>> {
        let result = self.word(address)?.compare_exchange(
            expected,
            value,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        if let Ok(old) = result {
            self.note_change(address, old, value, op);
        }
        Some(result)
    }

    fn note_change(&mut self, address: u64, old: u64, value: u64, op: Op) {
        // Writing the same word again counts: it says that the entry is meant as of now.
        self.changed.insert(address & !7, op);
        if old == value {
            return;
        }
        let address = address & !7;
        if self.track_lines {
            self.unwritten.entry(address).or_insert(old);
        }
        if self.track_buffer {
            self.buffered.entry(address).or_insert(old);
        }
    }

    /// When the host last wrote the word at `address`.
    pub(crate) fn changed_at(&self, address: u64) -> Option<Op> {
        self.changed.get(&(address & !7)).copied()
    }

    /// Writes the 64-byte cache line around `address` back.
    pub(crate) fn write_back(&mut self, address: u64) {
        let line = address & !63;
        for word in 0..8 {
            self.unwritten.remove(&line.saturating_add(8 * word));
        }
    }

    /// Lets everything in the write buffer through.
    pub(crate) fn flush_buffer(&mut self) {
        self.buffered.clear();
    }

    /// Reads bytes within one frame; false outside RAM.
    pub(crate) fn read_bytes(&self, address: u64, bytes: &mut [u8]) -> bool {
        for (offset, byte) in bytes.iter_mut().enumerate() {
            let at = address.saturating_add(offset as u64);
            let Some(word) = self.word(at) else {
                return false;
            };
            let shift = 8 * (at & 7);
            *byte = (word.load(Ordering::SeqCst) >> shift) as u8;
        }
        true
    }

    /// Writes bytes for hardware; false outside RAM.
    pub(crate) fn write_bytes(&mut self, address: u64, bytes: &[u8]) -> bool {
        for (offset, byte) in bytes.iter().enumerate() {
            let at = address.saturating_add(offset as u64);
            let shift = 8 * (at & 7);
            let Some(word) = self.word(at) else {
                return false;
            };
            let merge = |old: u64| (old & !(0xff << shift)) | (u64::from(*byte) << shift);
            let mut old = word.load(Ordering::SeqCst);
            while let Err(now) =
                word.compare_exchange(old, merge(old), Ordering::SeqCst, Ordering::SeqCst)
            {
                old = now;
            }
            self.unwritten.remove(&(at & !7));
            self.buffered.remove(&(at & !7));
        }
        true
    }
}
