//! What the guest was started with.
//!
//! Source: Xen's public header `arch-x86/hvm/start_info.h`.

use core::sync::atomic::Ordering;

use crate::arch::{PAGE, words};

/// The longest command line that is kept.
const LINE: usize = 512;

/// The start information.
pub(crate) struct Start {
    magic: u32,
    flags: u32,
    line: [u8; LINE],
    length: usize,
    memory: u64,
}

impl Start {
    /// Read it, before anything else uses its page.
    pub(crate) fn read(at: u64) -> Self {
        let byte = |at: u64| {
            let word = words(at / PAGE).and_then(|words| words.get((at % PAGE / 8) as usize));
            word.map_or(0, |word| word.load(Ordering::Relaxed).to_le_bytes()[(at % 8) as usize])
        };
        let number = |at: u64, bytes: u64| {
            (0..bytes).rev().fold(0, |value, place| value << 8 | u64::from(byte(at + place)))
        };
        let (text, map) = (number(at + 24, 8), number(at + 40, 8));
        let mut line = [0; LINE];
        let mut length = 0;
        if text != 0 {
            for (slot, at) in line.iter_mut().zip(text..) {
                *slot = byte(at);
                if *slot == 0 {
                    break;
                }
                length += 1;
            }
        }
        let lines = number(at + 48, 4);
        let usable = (0..lines).map(|line| map + 24 * line);
        let usable = usable.filter(|line| number(line + 16, 4) == 1);
        Self {
            magic: number(at, 4) as u32,
            flags: number(at + 8, 4) as u32,
            line,
            length,
            memory: usable.map(|line| number(line + 8, 8)).sum(),
        }
    }

    /// Whether it is start information at all.
    pub(crate) const fn is_sound(&self) -> bool {
        self.magic == 0x336e_c578
    }

    /// Whether this is the first domain.
    pub(crate) const fn is_initial(&self) -> bool {
        self.flags & 2 != 0
    }

    /// Bytes of memory.
    pub(crate) const fn memory(&self) -> u64 {
        self.memory
    }

    /// The command line.
    pub(crate) fn command_line(&self) -> &str {
        let bytes = self.line.get(..self.length).unwrap_or_default();
        core::str::from_utf8(bytes).unwrap_or("")
    }

    /// Whether the command line has this word.
    pub(crate) fn has_word(&self, word: &str) -> bool {
        self.command_line().split_ascii_whitespace().any(|found| found == word)
    }

    /// The number that the command line gives for a key.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        let words = self.command_line().split_ascii_whitespace();
        let mut values = words.filter_map(|word| word.split_once('='));
        values.find(|(name, _)| *name == key)?.1.parse().ok()
    }
}
