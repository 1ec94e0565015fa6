//! The fast forms against the definition, bit for bit, and what a round trip keeps.

use super::*;
use crate::device::Cpu;
use crate::simd::Isa;

const DTYPES: [PackedDtype; 2] = [PackedDtype::Bf16, PackedDtype::Int8];

/// Where slots and packed slots lie in the arenas of these tests, with bytes before and behind.
const AT: usize = 128;

/// Packs and unpacks.
enum Form {
    Naive,
    Fast(Cpu),
}

impl Form {
    /// The definition, and the fast form on each instruction set with one thread and several.
    fn all() -> Vec<Form> {
        let fast = Isa::available().into_iter().flat_map(|isa| {
            [1, 3].map(|threads| Form::Fast(Cpu::new(isa, threads).expect("threads start")))
        });
        std::iter::once(Form::Naive).chain(fast).collect()
    }

    /// The packed slot of `slot`, in an arena of other bytes.
    fn pack(&self, packing: &Packing, slot: &Arena) -> Arena {
        let mut packed = filled(packing.packed_bytes());
        match self {
            Form::Naive => naive::pack(packing, slot, AT, &mut packed, AT),
            Form::Fast(cpu) => pack(cpu, packing, slot, AT, &mut packed, AT),
        }
        packed
    }

    /// The slot of `packed`, in an arena of other bytes.
    fn unpack(&self, packing: &Packing, packed: &Arena) -> Arena {
        let mut slot = filled(packing.slot_bytes());
        match self {
            Form::Naive => naive::unpack(packing, packed, AT, &mut slot, AT),
            Form::Fast(cpu) => unpack(cpu, packing, packed, AT, &mut slot, AT),
        }
        slot
    }
}

/// An arena with room for `bytes` at [`AT`], all of it 0xa5.
fn filled(bytes: usize) -> Arena {
    let mut arena = Arena::new(bytes + 2 * AT).expect("a small arena");
    arena.values_mut::<u8>(0, bytes + 2 * AT).fill(0xa5);
    arena
}

fn bytes(arena: &Arena) -> &[u8] {
    arena.values(0, arena.bytes())
}

/// An arena with one slot whose only part is this state.
fn slot_of(state: &[f32]) -> Arena {
    let mut arena = filled(size_of_val(state).next_multiple_of(PART_ALIGN));
    arena.f32s_mut(AT, state.len()).copy_from_slice(state);
    arena
}

/// `[1][value_dim][key_dim]` of `values`, packed with `dtype`.
fn one_head(dtype: PackedDtype, values: usize, key_dim: usize) -> Packing {
    let value_dim = values / key_dim;
    Packing::new(dtype, vec![Part::State { heads: 1, value_dim, key_dim }])
}

/// xorshift64*: small, and the same on every machine.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// A number of any size, and now and then a zero, an infinity or a NaN.
    fn any(&mut self) -> f32 {
        match self.bits() % 64 {
            0 => 0.0,
            1 => -0.0,
            2 if self.bits().is_multiple_of(8) => f32::NEG_INFINITY,
            3 if self.bits().is_multiple_of(8) => f32::from_bits(0xff80_0001 | self.bits()),
            4 => f32::from_bits(self.bits() & 0x807f_ffff),
            _ => f32::from_bits(self.bits() & 0xbfff_ffff),
        }
    }

    /// A number within -1 and 1.
    fn unit(&mut self) -> f32 {
        self.bits() as i32 as f32 / (1u32 << 31) as f32
    }
}

/// A state of `heads` heads and some windows, with key widths that fill no vector.
fn parts(key_dim: usize) -> Vec<Part> {
    vec![
        Part::State { heads: 3, value_dim: 5, key_dim },
        Part::Plain { bytes: 36 },
        Part::State { heads: 2, value_dim: 16, key_dim: 2 * key_dim },
        Part::Plain { bytes: 128 },
    ]
}

#[test]
fn all_forms_have_the_bits_of_the_definition() {
    let mut random = Random(7);
    for (dtype, key_dim) in DTYPES.into_iter().flat_map(|d| (1..=40).map(move |k| (d, k))) {
        let packing = Packing::new(dtype, parts(key_dim));
        let mut slot = filled(packing.slot_bytes());
        for x in slot.f32s_mut(AT, packing.slot_bytes() / size_of::<f32>()) {
            *x = random.any();
        }
        let packed = Form::Naive.pack(&packing, &slot);
        let back = Form::Naive.unpack(&packing, &packed);
        for form in Form::all() {
            let same = bytes(&form.pack(&packing, &slot)) == bytes(&packed);
            assert!(same, "{dtype:?}, keys of {key_dim}");
            let same = bytes(&form.unpack(&packing, &packed)) == bytes(&back);
            assert!(same, "{dtype:?}, keys of {key_dim}");
        }
    }
}

#[test]
fn parts_keep_their_order_and_plain_bytes_their_values() {
    for dtype in DTYPES {
        let packing = Packing::new(dtype, parts(7));
        let sizes = match dtype {
            PackedDtype::Bf16 => [256, 64, 896, 128],
            PackedDtype::Int8 => [192, 64, 576, 128],
        };
        let slot_sizes = [448, 64, 1792, 128];
        assert_eq!(packing.packed_bytes(), sizes.iter().sum::<usize>());
        assert_eq!(packing.slot_bytes(), slot_sizes.iter().sum::<usize>());
        let mut slot = filled(packing.slot_bytes());
        let first: Vec<u8> = (0..36).collect();
        let second: Vec<u8> = (100..228).collect();
        slot.values_mut(AT + 448, 36).copy_from_slice(&first);
        slot.values_mut(AT + 448 + 64 + 1792, 128).copy_from_slice(&second);
        for form in Form::all() {
            let packed = form.pack(&packing, &slot);
            assert_eq!(packed.values::<u8>(AT + sizes[0], 36), first);
            assert_eq!(packed.values::<u8>(AT + sizes[0] + 64 + sizes[2], 128), second);
            let back = form.unpack(&packing, &packed);
            assert_eq!(back.values::<u8>(AT + 448, 36), first);
            assert_eq!(back.values::<u8>(AT + 448 + 64 + 1792, 128), second);
            // Padding and what lies around stay as they were.
            let untouched = |arena: &Arena, at: usize, len| {
                assert!(arena.values::<u8>(at, len).iter().all(|byte| *byte == 0xa5), "{at}");
            };
            for arena in [&packed, &back] {
                untouched(arena, 0, AT);
                untouched(arena, arena.bytes() - AT, AT);
            }
            untouched(&packed, AT + sizes[0] + 36, 28);
            untouched(&back, AT + 420, 28);
        }
    }
}

#[test]
fn sixteen_bits_are_within_a_part_in_256() {
    let mut random = Random(9);
    let state: Vec<f32> = (0..4096).map(|i| random.unit() * f32::powi(10.0, i % 60 - 30)).collect();
    let packing = one_head(PackedDtype::Bf16, 4096, 64);
    let form = Form::Fast(Cpu::new(Isa::best(), 1).expect("one thread"));
    let packed = form.pack(&packing, &slot_of(&state));
    let back = form.unpack(&packing, &packed);
    for (x, y) in state.iter().zip(back.f32s(AT, 4096)) {
        assert!((x - y).abs() <= x.abs() / 256.0, "{x} comes back as {y}");
    }
}

/// What came back once comes back as it is, also in 8 bits: of all scales s, those that are a
/// largest size / 127 have s = 127 s / 127 when both are rounded.
#[test]
fn a_second_round_trip_changes_nothing() {
    let mut random = Random(13);
    for dtype in DTYPES {
        let key_dim = 500;
        let packing = one_head(dtype, 3 * key_dim, key_dim);
        for form in Form::all() {
            for what in ["anything", "numbers", "large numbers"] {
                let mut value = |i: usize| match what {
                    "anything" => random.any(),
                    "numbers" => f32::powi(10.0, (i % 60) as i32 - 30) * random.unit(),
                    _ => f32::MAX * (0.999_999 - 1e-4 * random.unit().abs()),
                };
                let state: Vec<f32> = (0..3 * key_dim).map(&mut value).collect();
                let packed = form.pack(&packing, &slot_of(&state));
                let back = form.unpack(&packing, &packed);
                let again = form.pack(&packing, &back);
                assert!(bytes(&form.unpack(&packing, &again)) == bytes(&back), "{dtype:?} {what}");
                // A channel whose every number is less than half the least normal one is all zeros
                // the second time, and has the scale of zeros then.
                if what != "anything" || dtype == PackedDtype::Bf16 {
                    assert!(bytes(&again) == bytes(&packed), "{dtype:?} {what}");
                }
            }
        }
    }
}

#[test]
fn sixteen_bits_round_to_nearest_with_ties_to_even_and_keep_what_is_no_number() {
    let cases = [
        (0x3f80_8000, 0x3f80_0000), // a tie, the lower is even
        (0x3f81_8000, 0x3f82_0000), // a tie, the upper is even
        (0x3f80_8001, 0x3f81_0000),
        (0xbf80_7fff, 0xbf80_0000),
        (0x0000_8000, 0x0000_0000), // half the least subnormal
        (0x0000_8001, 0x0001_0000),
        (0x007f_ffff, 0x0080_0000), // subnormal to normal
        (0x8000_0000, 0x8000_0000),
        (0x7f7f_7fff, 0x7f7f_0000), // the largest
        (0x7f7f_8000, 0x7f80_0000), // beyond it
        (0xff80_0000, 0xff80_0000),
        (0x7f80_0001, 0x7fc0_0000), // its payload lies in the lower half
        (0xffff_ffff, 0xffff_0000),
    ];
    let state: Vec<f32> = cases.iter().map(|(from, _)| f32::from_bits(*from)).collect();
    let packing = one_head(PackedDtype::Bf16, cases.len(), 1);
    for form in Form::all() {
        let back = form.unpack(&packing, &form.pack(&packing, &slot_of(&state)));
        for ((from, to), got) in cases.iter().zip(back.f32s(AT, cases.len())) {
            assert_eq!(got.to_bits(), *to, "{from:08x}");
        }
    }
}

/// The state that comes back from 8 bits, and the scale of each channel.
fn through_int8(form: &Form, state: &[f32], key_dim: usize) -> (Vec<f32>, Vec<f32>) {
    let packing = one_head(PackedDtype::Int8, state.len(), key_dim);
    let packed = form.pack(&packing, &slot_of(state));
    let back = form.unpack(&packing, &packed);
    (back.f32s(AT, state.len()).to_vec(), packed.f32s(AT, key_dim).to_vec())
}

/// Half a step is what rounding to whole steps costs; quotient and product are themselves rounded.
#[test]
fn eight_bits_are_within_half_a_step() {
    let mut random = Random(11);
    let (rows, key_dim) = (64, 200);
    // Channels from the least subnormals to the largest numbers.
    let size = |k: usize| f64::powi(10.0, k as i32 * 83 / 199 - 45);
    let state: Vec<f32> = (0..rows * key_dim)
        .map(|i| (f64::from(random.unit()) * size(i % key_dim)) as f32)
        .collect();
    let form = Form::Fast(Cpu::new(Isa::best(), 1).expect("one thread"));
    let (back, scales) = through_int8(&form, &state, key_dim);
    for (i, (x, y)) in state.iter().zip(&back).enumerate() {
        let (x, y, scale) = (f64::from(*x), f64::from(*y), f64::from(scales[i % key_dim]));
        let rounding = (x.abs() + y.abs()) / f64::powi(2.0, 24);
        assert!((x - y).abs() <= scale / 2.0 + rounding, "{x} comes back as {y}, scale {scale}");
    }
    for (k, scale) in scales.iter().enumerate() {
        let largest = state.iter().skip(k).step_by(key_dim).fold(0.0f32, |m, x| m.max(x.abs()));
        let expected = if largest == 0.0 { 0.0 } else { (largest / 127.0).max(f32::MIN_POSITIVE) };
        assert_eq!(*scale, expected);
    }
}

#[test]
fn eight_bits_have_a_scale_per_head_and_key_channel() {
    // Two heads of two rows of two channels; each channel's largest comes back as it is.
    let state = [127.0, 2e-3, -64.0, -1e-3, 5e9, -1.0, 1e9, 0.25];
    let parts = vec![Part::State { heads: 2, value_dim: 2, key_dim: 2 }];
    let packing = Packing::new(PackedDtype::Int8, parts);
    for form in Form::all() {
        let packed = form.pack(&packing, &slot_of(&state));
        let scales = [127.0 / 127.0, 2e-3 / 127.0, 5e9 / 127.0, 1.0 / 127.0];
        assert_eq!(packed.f32s(AT, 4), scales);
        assert_eq!(packed.values::<i8>(AT + 16, 8), [127, 127, -64, -64, 127, -127, 25, 32]);
    }
}

#[test]
fn eight_bits_round_to_nearest_with_ties_to_even() {
    let state = [127.0, 0.5, 1.5, -0.5, -1.5, 2.5, -2.5, 126.5, 0.499];
    for form in Form::all() {
        let (back, scales) = through_int8(&form, &state, 1);
        assert_eq!(scales, [1.0]);
        assert_eq!(back, [127.0, 0.0, 2.0, 0.0, -2.0, 2.0, -2.0, 126.0, 0.0]);
    }
}

#[test]
fn a_channel_of_zeros_comes_back_as_zeros() {
    for form in Form::all() {
        let (back, scales) = through_int8(&form, &[0.0, 1.0, -0.0, -3.0, 0.0, 0.0], 2);
        assert_eq!(scales[0].to_bits(), 0);
        assert!(back.iter().step_by(2).all(|x| x.to_bits() == 0));
    }
}

#[test]
fn what_is_no_number_takes_its_channel_with_it_and_no_other() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)]
    {
        for row in 0..3 {
            let mut state = [1.0f32; 3 * 20];
            state[row * 20 + 17] = bad;
            for form in Form::all() {
                let (back, scales) = through_int8(&form, &state, 20);
                assert_eq!(scales[17].to_bits(), f32::NAN.to_bits());
                for (i, x) in back.iter().enumerate() {
                    assert_eq!(x.is_nan(), i % 20 == 17, "{bad} in row {row}: value {i} is {x}");
                }
            }
        }
    }
}

#[test]
fn the_largest_number_comes_back_as_an_infinity() {
    for form in Form::all() {
        let (back, _) = through_int8(&form, &[f32::MAX, f32::MAX.next_down()], 2);
        assert!(back[0] == f32::INFINITY && back[1].is_finite());
        let packing = one_head(PackedDtype::Bf16, 1, 1);
        let back = form.unpack(&packing, &form.pack(&packing, &slot_of(&[f32::MAX])));
        assert_eq!(back.f32s(AT, 1), [f32::INFINITY]);
    }
}

#[test]
#[should_panic(expected = "bytes at 128 leave an arena of 256 bytes")]
fn a_packed_slot_outside_its_arena_is_refused() {
    let packing = one_head(PackedDtype::Bf16, 128, 8);
    let (slot, mut packed) = (slot_of(&[0.0; 128]), Arena::new(256).expect("a small arena"));
    let cpu = Cpu::new(Isa::best(), 1).expect("one thread");
    pack(&cpu, &packing, &slot, AT, &mut packed, AT);
}
