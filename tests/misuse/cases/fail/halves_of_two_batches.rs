// The CPU half is on one batch's record and the device half on another's.
use flush::*;
use misuse::*;

fn main() {
    let domain = DomainId::new(1);
    let mut one: Batch<Page, 4> = Batch::new(domain);
    let mut other: Batch<Page, 4> = Batch::new(domain);
    let frame = Run::single(Gfn::new(5));
    let _ = one.hold(|skipped| {
        let cpu = skipped.leaf::<Tlb>(frame, 0);
        let _ = other.hold(|skipped| {
            let device = skipped.leaf::<Iotlb>(frame, 0);
            Ok::<_, ()>((Page(Mfn::new(7)), cpu.with(&device)))
        });
        Err::<(Page, Cleared<'_>), _>(())
    });
}
