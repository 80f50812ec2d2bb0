//! What the programs that must not compile have in common.
//!
//! Each file in `cases/fail/` is a small hypervisor with one mistake, and beside it what
//! the compiler says about it. `cases/correct.rs` is the one without a mistake: it
//! compiles and runs, so that the others fail for the mistake and nothing else.

use flush::{Cover, DomainId, Flush, FreshTable, Kind, Mfn, Released, TablePage};

/// Hardware that forgets at once.
#[derive(Debug)]
pub struct Idle;

impl<K: Kind> Flush<K> for Idle {
    type InFlight = ();
    type Error = &'static str;
    fn start(&self, _: DomainId, _: &Cover) {}
    fn wait(&self, (): ()) -> Result<(), &'static str> {
        Ok(())
    }
}

/// A guest page whose mapping is gone.
#[derive(Debug)]
pub struct Page(pub Mfn);

/// Gives a guest page back to its owner.
pub fn give_back(page: Released<Page>) -> Mfn {
    page.get().0
}

/// Gives a table page back to its allocator.
pub fn free_table(page: Released<TablePage>) -> FreshTable {
    page.recycle()
}
