// Only the device's table was edited: the guest still reaches the page.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 32> = Batch::new(DomainId::new(1));
    let _ = batch.hold(|skipped| {
        let device = skipped.leaf::<Iotlb>(Run::single(Gfn::new(5)), 0);
        Ok::<_, ()>((Page(Mfn::new(7)), Cleared::from(device)))
    });
}
