// Only one of two tables was edited: the device still reaches the page.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 32> = Batch::new(DomainId::new(1));
    let _ = batch.hold(|skipped| {
        let cpu = skipped.leaf::<Tlb>(Run::single(Gfn::new(5)), 0);
        Ok::<_, ()>((Page(Mfn::new(7)), cpu.into()))
    });
}
