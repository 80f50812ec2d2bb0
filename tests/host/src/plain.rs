//! Memory without hardware: for counting the instructions of the code alone.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use flush::{Cover, DomainId, Flush, Kind, Mfn};

use crate::{Ram, hypervisor::lock};

/// Frames of words, and a list of free ones.
#[derive(Debug)]
pub struct PlainRam {
    frames: Vec<Arc<[AtomicU64; 512]>>,
    free: Mutex<Vec<u64>>,
}

impl PlainRam {
    /// `frames` zeroed frames; frame 0 is never handed out.
    pub fn new(frames: u64) -> Self {
        Self {
            frames: (0..frames).map(|_| Arc::new([const { AtomicU64::new(0) }; 512])).collect(),
            free: Mutex::new((1..frames).rev().collect()),
        }
    }

    #[inline]
    fn word(&self, mfn: Mfn, index: usize) -> &AtomicU64 {
        let frame = usize::try_from(mfn.get()).expect("a frame of this machine");
        &self.frames[frame][index]
    }
}

impl Ram for PlainRam {
    fn frames(&self) -> u64 {
        self.frames.len() as u64
    }

    #[inline]
    fn read(&self, mfn: Mfn, index: usize) -> u64 {
        self.word(mfn, index).load(Ordering::Acquire)
    }

    #[inline]
    fn read_words(&self, mfn: Mfn, index: usize, words: &mut [[u8; 8]]) {
        let frame = usize::try_from(mfn.get()).expect("a frame of this machine");
        let frame = &self.frames[frame][index..index + words.len()];
        for (word, read) in words.iter_mut().zip(frame) {
            *word = read.load(Ordering::Acquire).to_le_bytes();
        }
    }

    #[inline]
    fn write(&self, mfn: Mfn, index: usize, value: u64) {
        self.word(mfn, index).store(value, Ordering::Release);
    }

    #[inline]
    fn swap(&self, mfn: Mfn, index: usize, value: u64) -> u64 {
        self.word(mfn, index).swap(value, Ordering::SeqCst)
    }

    #[inline]
    fn compare_exchange(&self, mfn: Mfn, index: usize, current: u64, new: u64) -> Result<(), u64> {
        let word = self.word(mfn, index);
        word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst).map(|_| ())
    }

    fn words(&self, mfn: Mfn) -> Option<Arc<[AtomicU64; 512]>> {
        usize::try_from(mfn.get()).ok().and_then(|frame| self.frames.get(frame)).cloned()
    }

    fn allocate(&self, _: DomainId) -> Option<Mfn> {
        let mfn = lock(&self.free).pop().map(Mfn::new)?;
        for index in 0..512 {
            self.write(mfn, index, 0);
        }
        Some(mfn)
    }

    fn release(&self, mfn: Mfn) {
        lock(&self.free).push(mfn.get());
    }

    fn now_us(&self) -> u64 {
        0
    }

    fn relax(&self) {}
}

/// Hardware that holds nothing and forgets at once.
#[derive(Clone, Copy, Debug)]
pub struct Null;

impl<K: Kind> Flush<K> for Null {
    type InFlight = ();
    type Error = std::convert::Infallible;

    fn start(&self, _: DomainId, _: &Cover) {}

    fn wait(&self, (): ()) -> Result<(), Self::Error> {
        Ok(())
    }
}
