// A page joins the batch while the batch gives out what it flushed.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    let Ok(mut flushed) = batch.flush(&Hardware { tlb: &Idle, iotlb: &Idle }) else { return };
    let _ = batch.hold(|skipped| {
        let cleared = skipped.leaf::<Shared>(Run::single(Gfn::new(5)), 0).into();
        Ok::<_, ()>((Page(Mfn::new(7)), cleared))
    });
    let _ = flushed.next_page();
}
