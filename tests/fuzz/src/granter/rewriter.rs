//! The granter itself: what it plans, what it writes, and all it ever offered.
//!
//! A [`Rewriter`] takes its chances one by one, each of them a [`Move`]. It keeps every
//! value that its words had since a call began: what it offered at any moment counts.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use arbitrary::{Arbitrary, Unstructured};
use flush::Gfn;
use gnttab::Version;
use host::world::{BACKEND, FRONTEND, granted_gfn};

use super::REFERENCES;
use crate::{
    script::Below,
    sheet::{Sheet, keys, number},
    watched::Watcher,
};

/// One chance, taken or not.
#[derive(Clone, Copy, Debug)]
pub(super) enum Move {
    Nothing(u8),
    Entry(u64, Offer),
    /// Another word than those of entries: in version 2 a frame, or half of another entry.
    Word(u64, u64),
    Status(u64, u16),
}

/// An entry as the granter writes it.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) enum Offer {
    Good(Below<REFERENCES>),
    ReadOnly(Below<REFERENCES>),
    /// For somebody else.
    Other(Below<REFERENCES>),
    Revoked,
    SubPage(Below<REFERENCES>),
    NoRam,
    /// As good, and in use as if by somebody.
    Used(Below<REFERENCES>),
}

impl<'a> Arbitrary<'a> for Move {
    fn arbitrary(bytes: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let below = |bytes: &mut Unstructured<'a>, end: u64| bytes.int_in_range(0..=end - 1);
        Ok(match bytes.int_in_range(0..=7_u8)? {
            0..=3 => Self::Nothing(bytes.int_in_range(0..=31)?),
            4 | 5 => Self::Entry(below(bytes, REFERENCES)?, bytes.arbitrary()?),
            6 => Self::Word(below(bytes, 2 * REFERENCES)?, granted(below(bytes, REFERENCES)?)),
            _ => Self::Status(below(bytes, REFERENCES)?, bytes.arbitrary()?),
        })
    }
}

pub(super) fn granted(page: u64) -> u64 {
    granted_gfn(u32::try_from(page).expect("few pages")).get()
}

impl Offer {
    /// Flags and grantee, and the frame.
    fn parts(self) -> (u64, u64) {
        let to = |id: flush::DomainId| u64::from(id.get()) << 16;
        let good = 1 | to(BACKEND);
        match self {
            Self::Good(page) => (good, granted(page.0)),
            Self::ReadOnly(page) => (good | 1 << 2, granted(page.0)),
            Self::Other(page) => (1 | to(FRONTEND), granted(page.0)),
            Self::Revoked => (0, 0),
            Self::SubPage(page) => (good | 1 << 8, granted(page.0)),
            Self::NoRam => (good, 0xffff_ffff),
            Self::Used(page) => (good | 3 << 3, granted(page.0)),
        }
    }
}

/// The granter, and all it ever wrote.
pub(super) struct Rewriter {
    words: Arc<[AtomicU64; 512]>,
    pub(super) version: Version,
    pub(super) plan: Vec<Move>,
    wait: u8,
    /// Every value that each word had since the call began.
    seen: Vec<BTreeSet<u64>>,
    /// What goes into status words when the table is next in reach.
    pub(super) statuses: Vec<(u64, u16)>,
    sheet: Sheet,
}

/// The granter as an actor of a scenario.
const GRANTER: Option<&str> = Some("granter");

impl Rewriter {
    fn write_word(&self, sort: &str, word: u64, value: u64) {
        self.sheet.step_of(GRANTER, "word", 0, || {
            keys! {
                sort: sort, word: number(word), low: value as u32, high: (value >> 32) as u32,
            }
        });
    }

    fn write_offer(&self, reference: u64, offer: Offer) {
        let (head, frame) = offer.parts();
        let page = match offer {
            Offer::Good(page)
            | Offer::ReadOnly(page)
            | Offer::Other(page)
            | Offer::SubPage(page)
            | Offer::Used(page) => page,
            Offer::Revoked => {
                let keys = || keys! { reference: number(reference), flags: 0 };
                return self.sheet.step_of(GRANTER, "entry", 0, keys);
            }
            Offer::NoRam => match self.version {
                Version::V1 => return self.write_word("shared", reference, head | frame << 32),
                Version::V2 => {
                    self.write_word("shared", 2 * reference + 1, frame);
                    return self.write_word("shared", 2 * reference, head);
                }
            },
        };
        let to = if matches!(offer, Offer::Other(_)) { "front" } else { "back" };
        self.sheet.step_of(GRANTER, "entry", 0, || {
            keys! {
                reference: number(reference), flags: number(head & 0xffff), to: to,
                page: format!("f{}", page.0),
            }
        });
    }

    fn write(&mut self, word: u64, value: u64) {
        let index = usize::try_from(word).expect("few words");
        self.seen[index].insert(value);
        self.words[index].store(value, Ordering::SeqCst);
    }

    pub(super) fn offer(&mut self, reference: u64, offer: Offer) {
        let (head, frame) = offer.parts();
        match self.version {
            Version::V1 => self.write(reference, head | frame << 32),
            Version::V2 => {
                self.write(2 * reference + 1, frame);
                self.write(2 * reference, head);
            }
        }
    }

    fn turn(&mut self) {
        if self.wait > 0 {
            self.wait -= 1;
            return;
        }
        match self.plan.pop() {
            None => {}
            Some(Move::Nothing(turns)) => self.wait = turns,
            Some(Move::Entry(reference, offer)) => {
                self.write_offer(reference, offer);
                self.offer(reference, offer);
            }
            Some(Move::Word(word, value)) => {
                self.write_word("shared", word, value);
                self.write(word, value);
            }
            Some(Move::Status(reference, value)) => {
                self.write_word("status", reference, value.into());
                self.statuses.push((reference, value));
            }
        }
    }

    /// A call begins: what is there now counts, and what is written from here on.
    pub(super) fn begin(&mut self) {
        for (seen, word) in self.seen.iter_mut().zip(self.words.iter()) {
            *seen = BTreeSet::from([word.load(Ordering::SeqCst)]);
        }
    }

    /// Frames that this reference granted to the backend since the call began.
    pub(super) fn offered(&self, reference: u64, writing: bool) -> BTreeSet<u64> {
        let grants = |head: u64| {
            head & 0b11 == 1
                && head & 1 << 8 == 0
                && (head >> 16) as u16 == BACKEND.get()
                && !(writing && head & 1 << 2 != 0)
        };
        let index = usize::try_from(reference).expect("few references");
        let heads =
            |index: usize| self.seen[index].iter().copied().filter(move |head| grants(*head));
        match self.version {
            Version::V1 => heads(index).map(|word| word >> 32).collect(),
            // The frame lies in a word of its own, which may be from another moment.
            Version::V2 if heads(2 * index).next().is_some() => self.seen[2 * index + 1].clone(),
            Version::V2 => BTreeSet::new(),
        }
    }
}

#[derive(Clone)]
pub(super) struct Granter(Arc<Mutex<Rewriter>>);

impl Granter {
    pub(super) fn new(words: Arc<[AtomicU64; 512]>, sheet: Sheet) -> Self {
        let rewriter = Rewriter {
            words,
            version: Version::V1,
            plan: Vec::new(),
            wait: 0,
            seen: vec![BTreeSet::new(); 2 * REFERENCES as usize],
            statuses: Vec::new(),
            sheet,
        };
        Self(Arc::new(Mutex::new(rewriter)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Rewriter> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watcher for Granter {
    fn turn(&self) {
        self.lock().turn();
    }

    fn names(&self, _: Gfn) {}
}
