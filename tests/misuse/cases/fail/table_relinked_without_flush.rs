// An unlinked table page is taken for one that hardware has never seen.
use flush::*;

fn link(_: FreshTable) {}

fn main() {
    link(TablePage::unlinked(Mfn::new(7)));
}
