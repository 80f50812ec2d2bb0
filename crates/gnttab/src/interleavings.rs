//! Every interleaving of a hypervisor and a granter on one entry, under loom.
//!
//! Built with `--cfg loom` only. Some granters here are honest and look at the in-use bits
//! before they use their page again; the others rewrite the entry as they like. The code
//! under test is the crate's own; only its atomics are the model checker's.

extern crate std;

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::{Arc, atomic::AtomicU64 as Ghost};

use flush::DomainId;
use loom::{model::Builder, thread};

use crate::{
    abi::entry_flags::{PERMIT_ACCESS, READING, WRITING},
    entry::{
        OpenError, Opened, Rights, Sorts, TRIES, Target, Word, close_v1, close_v2, open_v1, open_v2,
    },
    swap::swap_word,
    sync::{AtomicU16, AtomicU64, fence},
};

const CALLER: DomainId = DomainId::new(1);
const OTHER: u16 = 3;
const FRAME: u64 = 0x77;
const SECRET: u64 = 0x99;

const fn head(flags: u16, domain: u16) -> u64 {
    flags as u64 | (domain as u64) << 16
}

const GRANTED: u64 = head(PERMIT_ACCESS, 1);
const IN_USE: u64 = (READING | WRITING) as u64;

/// The shared words of one grant, and the granter's page.
struct Entry {
    /// Version 1's entry, or version 2's first word.
    head: AtomicU64,
    frame: AtomicU64,
    status: AtomicU16,
    /// What the page holds: 0 before the granter wrote it, 1 by the granter, 2 by the caller.
    page: AtomicU64,
    /// The granter has taken its page back.
    back: Ghost,
}

impl Entry {
    fn new(head: u64, frame: u64, status: u16) -> Arc<Self> {
        Arc::new(Self {
            head: AtomicU64::new(head),
            frame: AtomicU64::new(frame),
            status: AtomicU16::new(status),
            page: AtomicU64::new(0),
            back: Ghost::new(0),
        })
    }

    fn open_v2(&self, rights: Rights) -> Result<Opened, OpenError> {
        open_v2(&self.head, &self.frame, &self.status, CALLER, rights, Sorts::Pages)
    }

    /// The caller uses what it opened, once.
    fn write_page(&self) {
        self.page.store(2, Relaxed);
    }

    /// The granter is sure that nobody uses its page.
    fn take_back(&self, opened: bool) {
        self.back.store(1, SeqCst);
        let page = self.page.load(Relaxed);
        assert!(!opened || page == 2, "a write of the holder comes after the end of its use");
    }
}

/// The frame of an entry that grants a page.
fn frame(opened: Opened) -> u64 {
    match opened.target {
        Target::Page { frame, .. } => frame.get(),
        Target::Forward { .. } => panic!("nothing is passed on here"),
    }
}

#[track_caller]
fn check(name: &str, scene: impl Fn() + Sync + Send + 'static) {
    let runs = Arc::new(Ghost::new(0));
    let counted = runs.clone();
    Builder::new().check(move || {
        counted.fetch_add(1, SeqCst);
        scene();
    });
    std::println!("interleavings | {name:<40} | {}", runs.load(SeqCst));
}

/// An entry that grants nothing of the caller's is never opened, whatever it was before.
#[test]
fn version_1_never_opens_what_is_not_granted_at_that_instant() {
    check("version 1, a granter that rewrites", || {
        let entry = Entry::new(GRANTED | FRAME << 32, 0, 0);
        let granter = {
            let entry = entry.clone();
            thread::spawn(move || {
                // Each of them names a frame that the caller may not have by that entry.
                entry.head.store(head(PERMIT_ACCESS, OTHER) | SECRET << 32, Relaxed);
                entry.head.store(GRANTED | FRAME << 32, Relaxed);
                entry.head.store(head(PERMIT_ACCESS, OTHER) | SECRET << 32, Relaxed);
            })
        };
        if let Ok(opened) = open_v1(&entry.head, CALLER, Rights::ReadWrite) {
            assert_eq!(frame(opened), FRAME, "a frame that was granted to somebody else");
        }
        granter.join().expect("the granter");
    });
}

/// A granter that rewrites for ever costs so many tries and no more.
#[test]
fn version_1_gives_up_on_a_granter_that_does_not_rest() {
    /// Counts the exchanges.
    struct Counted<'a>(&'a AtomicU64, core::cell::Cell<usize>);

    impl Word for Counted<'_> {
        fn load(&self) -> u64 {
            Word::load(self.0)
        }

        fn exchange(&self, expected: u64, new: u64) -> Result<(), u64> {
            self.1.set(self.1.get() + 1);
            // As if another frame were written before each of them.
            let now = Word::load(self.0);
            self.0.store(now ^ 1 << 32, Relaxed);
            Word::exchange(self.0, expected, new)
        }
    }

    check("version 1, a granter without rest", || {
        let word = AtomicU64::new(GRANTED | FRAME << 32);
        let counted = Counted(&word, core::cell::Cell::new(0));
        let opened = open_v1(&counted, CALLER, Rights::Read);
        assert_eq!(opened, Err(OpenError::Unstable));
        assert!(counted.1.get() <= TRIES, "a try too many");
    });
}

/// An honest granter revokes by an exchange that the in-use bits fail.
#[test]
fn version_1_is_not_open_once_its_granter_has_revoked_it() {
    check("version 1, a revocation", || {
        let entry = Entry::new(GRANTED | FRAME << 32, 0, 0);
        let granter = {
            let entry = entry.clone();
            thread::spawn(move || {
                let granted = GRANTED | FRAME << 32;
                let revoked = entry.head.compare_exchange(granted, 0, SeqCst, SeqCst).is_ok();
                if revoked {
                    entry.take_back(false);
                }
                revoked
            })
        };
        let opened = open_v1(&entry.head, CALLER, Rights::ReadWrite).is_ok();
        let revoked = granter.join().expect("the granter");
        assert!(!(opened && revoked), "in use and revoked");
        assert!(opened || revoked, "neither got it");
    });
}

/// What a holder wrote is there when its granter sees the bits gone.
#[test]
fn version_1_ends_a_use_before_its_granter_sees_the_end() {
    check("version 1, the end of a use", || {
        let entry = Entry::new(GRANTED | IN_USE | FRAME << 32, 0, 0);
        let holder = {
            let entry = entry.clone();
            thread::spawn(move || {
                entry.write_page();
                close_v1(&entry.head, READING | WRITING);
            })
        };
        if entry.head.load(Acquire) & IN_USE == 0 {
            entry.take_back(true);
        }
        holder.join().expect("the holder");
    });
}

/// What a granter wrote before it granted is there for who opens it.
#[test]
fn an_opened_page_is_as_its_granter_left_it() {
    for version_2 in [false, true] {
        check("a grant that is new", move || {
            let entry = Entry::new(0, 0, 0);
            let granter = {
                let entry = entry.clone();
                thread::spawn(move || {
                    entry.page.store(1, Relaxed);
                    if version_2 {
                        entry.frame.store(FRAME, Relaxed);
                        entry.head.store(GRANTED, Release);
                    } else {
                        entry.head.store(GRANTED | FRAME << 32, Release);
                    }
                })
            };
            let opened = if version_2 {
                entry.open_v2(Rights::Read)
            } else {
                open_v1(&entry.head, CALLER, Rights::Read)
            };
            if let Ok(opened) = opened {
                assert_eq!(frame(opened), FRAME, "the frame is older than the grant");
                assert_eq!(entry.page.load(Relaxed), 1, "the page is older than the grant");
            }
            granter.join().expect("the granter");
        });
    }
}

/// What a granter wrote before it granted is there for who opens the entry after a swap,
/// whichever of the two it was in before.
#[test]
fn a_swapped_grant_is_as_its_granter_left_it() {
    for first in [true, false] {
        check("a grant that is new, and swapped", move || {
            let entry = Entry::new(0, 0, 0);
            let other = Arc::new(AtomicU64::new(0));
            let granter = {
                let (entry, other) = (entry.clone(), other.clone());
                thread::spawn(move || {
                    entry.page.store(1, Relaxed);
                    let word = if first { &entry.head } else { &other };
                    word.store(GRANTED | FRAME << 32, Release);
                })
            };
            swap_word(&entry.head, &other);
            let opened = if first { &other } else { &entry.head };
            if let Ok(opened) = open_v1(opened, CALLER, Rights::Read) {
                assert_eq!(frame(opened), FRAME, "the frame is older than the grant");
                assert_eq!(entry.page.load(Relaxed), 1, "the page is older than the grant");
            }
            granter.join().expect("the granter");
        });
    }
}

/// Version 2: the granter revokes, fences, and looks at the status.
#[test]
fn version_2_is_not_open_once_its_granter_has_revoked_it() {
    check("version 2, a revocation", || {
        let entry = Entry::new(GRANTED, FRAME, 0);
        let granter = {
            let entry = entry.clone();
            thread::spawn(move || {
                entry.head.store(0, Relaxed);
                fence(SeqCst);
                entry.status.load(Acquire) & IN_USE as u16 == 0
            })
        };
        let opened = entry.open_v2(Rights::ReadWrite).is_ok();
        let revoked = granter.join().expect("the granter");
        assert!(!(opened && revoked), "in use and revoked");
        let left = entry.status.load(Relaxed);
        assert_eq!(left != 0, opened, "in-use bits without a use");
    });
}

/// Version 2: who is refused takes back what it set, and nothing that an earlier use set.
#[test]
fn version_2_undoes_only_what_it_set() {
    check("version 2, a reader beside", || {
        let entry = Entry::new(GRANTED, FRAME, READING);
        let granter = {
            let entry = entry.clone();
            thread::spawn(move || entry.head.store(0, Relaxed))
        };
        let opened = entry.open_v2(Rights::ReadWrite);
        granter.join().expect("the granter");
        let expected = if opened.is_ok() { READING | WRITING } else { READING };
        assert_eq!(entry.status.load(Relaxed), expected, "the reader's bit, and no other");
    });
}

/// Version 2: as for version 1.
#[test]
fn version_2_ends_a_use_before_its_granter_sees_the_end() {
    check("version 2, the end of a use", || {
        let entry = Entry::new(GRANTED, FRAME, READING | WRITING);
        let holder = {
            let entry = entry.clone();
            thread::spawn(move || {
                entry.write_page();
                close_v2(&entry.status, READING | WRITING);
            })
        };
        if entry.status.load(Acquire) == 0 {
            entry.take_back(true);
        }
        holder.join().expect("the holder");
    });
}
