// A table page goes back to its allocator as soon as it is unlinked.
use flush::*;
use misuse::*;

fn main() {
    let page = TablePage::unlinked(Mfn::new(7));
    let _ = free_table(page);
}
