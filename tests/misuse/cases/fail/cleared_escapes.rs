// A proof is kept past its edit, to be used when its batch was long flushed.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    let kept: Cleared<'_> = batch
        .edit_many(|skipped, _| skipped.leaf::<Shared>(Run::single(Gfn::new(5)), 0).into());
    let _ = batch.edit_many(|_, room| room.hold(Page(Mfn::new(7)), kept));
}
