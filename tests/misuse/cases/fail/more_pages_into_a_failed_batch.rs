// A page joins a failed batch, to pass under the completion of its retry.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    if let Err(mut failure) = batch.flush(&Hardware { tlb: &Idle, iotlb: &Idle }) {
        let _ = failure.held.hold(|skipped| {
            let cleared = skipped.leaf::<Shared>(Run::single(Gfn::new(5)), 0).into();
            Ok::<_, ()>((Page(Mfn::new(7)), cleared))
        });
    }
}
