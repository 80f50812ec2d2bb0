// The flush is on one batch's record, the page waits in another batch.
use flush::*;
use misuse::*;

fn main() {
    let domain = DomainId::new(1);
    let mut one: Batch<Page, 4> = Batch::new(domain);
    let mut other: Batch<Page, 4> = Batch::new(domain);
    one.edit_many(|skipped, _| {
        let cleared = Cleared::from(skipped.leaf::<Shared>(Run::single(Gfn::new(5)), 0));
        other.edit_many(|_, room| room.hold(Page(Mfn::new(7)), cleared)).unwrap();
    });
}
