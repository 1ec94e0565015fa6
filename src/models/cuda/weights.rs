//! Weights on the device: matrices as they are stored, row after row, small tensors widened.

use kernels::cuda::dense::Embedding;
use kernels::cuda::gemm::{self, DeviceMatrix, Inputs, Rounded, RoundedRows};
use kernels::cuda::{Cuda, CudaError, DeviceBuffer, DeviceRows, DeviceRowsMut};
use kernels::{Compute, Dtype, Matrix};

use crate::models::files::ModelWeights;
use crate::models::spec::Part;

/// A matrix on the device.
#[derive(Debug)]
pub(super) struct DeviceTensor {
    bytes: DeviceBuffer<u8>,
    rows: usize,
    cols: usize,
    dtype: Dtype,
}

impl DeviceTensor {
    /// A copy of matrices of equally many inputs, one below the other.
    ///
    /// # Panics
    /// When their types or inputs differ.
    fn of(cuda: &Cuda, parts: &[Matrix<'_>]) -> Result<DeviceTensor, CudaError> {
        let (cols, dtype) = (parts[0].cols, parts[0].values.dtype());
        assert!(parts.iter().all(|part| part.cols == cols && part.values.dtype() == dtype));
        let rows = parts.iter().map(|part| part.rows).sum();
        let mut bytes = DeviceBuffer::zeros(cuda, rows * cols * dtype.bytes())?;
        let mut at = 0;
        for part in parts {
            let values = part.values.bytes();
            bytes.write(cuda, at, values)?;
            at += values.len();
        }
        Ok(DeviceTensor { bytes, rows, cols, dtype })
    }

    pub fn matrix(&self) -> DeviceMatrix<'_> {
        DeviceMatrix::new(self.rows, self.cols, self.dtype, self.bytes.slice())
    }

    /// The matrix as an embedding: its rows are looked up.
    pub fn embedding(&self) -> Embedding<'_> {
        Embedding { bytes: self.bytes.slice(), dtype: self.dtype, width: self.cols }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Outputs and inputs.
    pub fn size(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }
}

/// Takes a layer's tensors to the device.
pub(super) struct Loader<'a> {
    pub cuda: &'a Cuda,
    pub weights: &'a ModelWeights,
    pub layer: Option<usize>,
}

impl<'a> Loader<'a> {
    pub fn host(&self, part: Part) -> Matrix<'a> {
        self.weights.matrix(&self.weights.tensor(self.layer, part))
    }

    pub fn tensor(&self, part: Part) -> Result<DeviceTensor, CudaError> {
        DeviceTensor::of(self.cuda, &[self.host(part)])
    }

    /// Matrices that multiply the same rows, as one where their types are one.
    pub fn stacked(&self, parts: &[Part]) -> Result<Vec<DeviceTensor>, CudaError> {
        let parts: Vec<Matrix<'_>> = parts.iter().map(|part| self.host(*part)).collect();
        match parts.iter().all(|part| part.values.dtype() == parts[0].values.dtype()) {
            true => Ok(vec![DeviceTensor::of(self.cuda, &parts)?]),
            false => parts.iter().map(|part| DeviceTensor::of(self.cuda, &[*part])).collect(),
        }
    }

    pub fn vector(&self, part: Part) -> Result<DeviceBuffer<f32>, CudaError> {
        DeviceBuffer::of(self.cuda, &self.weights.vector(self.layer, part))
    }
}

/// Rows that several matrices multiply, rounded once where products of bf16 weights round.
#[derive(Clone, Copy)]
pub(super) struct Multiplied<'a> {
    rows: DeviceRows<'a>,
    rounded: Option<Rounded<'a>>,
}

impl<'a> Multiplied<'a> {
    pub fn new(
        cuda: &Cuda,
        rows: DeviceRows<'a>,
        work: &'a mut RoundedRows,
    ) -> Result<Multiplied<'a>, CudaError> {
        let rounded = match cuda.compute {
            Compute::F32 => None,
            Compute::Bf16 => Some(work.round(cuda, rows)?),
        };
        Ok(Multiplied { rows, rounded })
    }

    /// The rows in the form that multiplies weights of a type.
    pub fn by(&self, dtype: Dtype) -> Inputs<'a> {
        match self.rounded {
            Some(rounded) if dtype == Dtype::Bf16 => Inputs::Bf16(rounded),
            _ => Inputs::F32(self.rows),
        }
    }

    /// `out = rows wᵀ`, the outputs of the matrices one beside the other.
    pub fn times(
        &self,
        cuda: &Cuda,
        matrices: &[DeviceTensor],
        out: &mut DeviceBuffer<f32>,
        rows: usize,
    ) -> Result<(), CudaError> {
        let width = matrices.iter().map(DeviceTensor::rows).sum();
        let mut at = 0;
        for tensor in matrices {
            let out = out.rows_mut(rows, width).columns(at, tensor.rows);
            gemm::gemm(cuda, self.by(tensor.dtype), tensor.matrix(), out)?;
            at += tensor.rows;
        }
        Ok(())
    }

    /// `out += rows wᵀ`.
    pub fn add_to(
        &self,
        cuda: &Cuda,
        tensor: &DeviceTensor,
        out: DeviceRowsMut<'_>,
    ) -> Result<(), CudaError> {
        gemm::gemm_add(cuda, self.by(tensor.dtype), tensor.matrix(), out)
    }
}
