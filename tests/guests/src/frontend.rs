//! The domain that grants: it takes pages back when nobody uses them.
//!
//! A page whose entry shows no use, and which was revoked then, is this guest's alone. It
//! writes it full and looks whether anything changes: whatever does was written through a
//! mapping that ended.

use core::hint::spin_loop;
use core::sync::atomic::Ordering;

use crate::arch::Page;
use crate::grants;
use crate::say;
use crate::xen::{self, event_op};

/// Pages that are granted.
pub(crate) const PAGES: usize = 256;
/// The reference of the first one.
pub(crate) const FIRST: usize = 8;
/// The domain that may map them, and this one.
const BACKEND: u16 = 1;
pub(crate) const FRONTEND: u16 = 2;
/// The port that the backend joins: the first that is free.
pub(crate) const PORT: u32 = 3;
/// How long a page is watched, in turns of which each lets the other processors run.
const PATIENCE: u32 = 16;

static GRANTED: [Page; PAGES] = [const { Page::zero() }; PAGES];
static SHARED_INFO: Page = Page::zero();

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Pages that were taken back and watched.
    watched: u64,
    /// Words in them that changed meanwhile.
    stale: u64,
    /// Uses that were seen to end.
    ends: u64,
}

/// Grant all pages; watch them until the backend says that it is done.
pub(crate) fn run() {
    const SELF: u32 = 0x7ff0;
    xen::find().expect("a hypervisor");
    assert_eq!(xen::add_to_physmap(0, 0, SHARED_INFO.gfn()), 0, "shared information");
    assert_eq!(grants::show_table(), 0, "the grant table");
    for (place, page) in GRANTED.iter().enumerate() {
        grants::grant(FIRST + place, BACKEND, page.gfn());
    }
    let words = [SELF | u32::from(BACKEND) << 16, 0, 0, 0, 0, 0];
    let [_, port, ..] = event_op(6, words).expect("a port for the backend");
    assert_eq!(port, PORT, "the port that the backend knows");

    let mut seen = Seen::default();
    let mut used = [false; PAGES];
    while SHARED_INFO.words()[256].load(Ordering::SeqCst) & 1 << PORT == 0 {
        for (place, (page, used)) in GRANTED.iter().zip(&mut used).enumerate() {
            let in_use = grants::is_in_use(FIRST + place);
            if *used && !in_use {
                seen.ends += 1;
            }
            // The use that ended is the one to be afraid of.
            if (*used || seen.watched == 0) && grants::revoke(FIRST + place) {
                watch(page, &mut seen);
                grants::grant(FIRST + place, BACKEND, page.gfn());
            }
            *used = in_use;
        }
        spin_loop();
    }
    let Seen { watched, stale, ends } = seen;
    say!("@ frontend watched={watched} ends={ends} stale={stale}");
    assert_eq!(stale, 0, "a page changed after its mapping had ended");
    assert!(watched > 0 && ends > 0, "no use was seen to end");
}

/// Look whether a page that is this guest's alone changes.
fn watch(page: &Page, seen: &mut Seen) {
    seen.watched += 1;
    let stamp = seen.watched << 8 | 0xa5;
    for word in page.words() {
        word.store(stamp, Ordering::Relaxed);
    }
    for _ in 0..PATIENCE {
        spin_loop();
    }
    let changed = page.words().iter().filter(|word| word.load(Ordering::Relaxed) != stamp);
    seen.stale += changed.count() as u64;
}
