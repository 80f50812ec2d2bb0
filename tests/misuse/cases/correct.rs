// The correct program: every page is given back through a flushed batch.
use flush::*;
use misuse::*;

fn main() {
    let hardware = Hardware { tlb: &Idle, iotlb: &Idle };
    let mut batch: Batch<Page, 32> = Batch::new(DomainId::new(1));
    let frame = Run::single(Gfn::new(5));
    batch
        .hold(|skipped| {
            let cpu = skipped.leaf::<Tlb>(frame, 0);
            let device = skipped.leaf::<Iotlb>(frame, 0);
            Ok::<_, ()>((Page(Mfn::new(7)), cpu.with(&device)))
        })
        .unwrap();
    batch.edit_many(|skipped, room| {
        skipped.table::<Shared>(frame, TablePage::unlinked(Mfn::new(9))).unwrap();
        let cleared = skipped.leaf::<Shared>(frame, 0).into();
        room.hold(Page(Mfn::new(8)), cleared).unwrap();
    });
    let mut flushed = match batch.flush(&hardware) {
        Ok(flushed) => flushed,
        Err(_) => panic!("this hardware does not fail"),
    };
    while let Some(page) = flushed.next_page() {
        assert!(give_back(page).get() > 6);
    }
    assert_eq!(free_table(flushed.next_table().unwrap()).mfn(), Mfn::new(9));
}
