// One cleared entry is the proof for two pages.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    batch.edit_many(|skipped, room| {
        let cleared = Cleared::from(skipped.leaf::<Shared>(Run::single(Gfn::new(5)), 0));
        room.hold(Page(Mfn::new(7)), cleared).unwrap();
        room.hold(Page(Mfn::new(8)), cleared).unwrap();
    });
}
